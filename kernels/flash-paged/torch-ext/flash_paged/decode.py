"""Attention of few queries over many keys: the query heads that share a key head are the rows of one matrix product, and
the keys of a row are split over programs (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

The grid follows from shapes alone, the share of each split from the lengths on the device: a CUDA graph can be replayed
while lengths grow.
"""

import torch
import triton
import triton.language as tl

from .config import decode_config, launch_device, processors
from .kv_formats import QuantizedKV
from .tiles import load_rows, locate_keys, score_scales, scores, softmax_step


MAX_SPLITS = 128
_KEYS_PER_SPLIT = 128  # a split with fewer keys costs more to combine than it saves


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "appended", "left", "right", "tiles", "splits", "kv_heads"])
def decode_kernel(
    q,
    k,
    v,
    out,
    partial,
    partial_lse,
    sinks,
    cache_seqlens,
    block_table,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    seqlen_q,
    seqlen_k,
    appended,
    kv_heads,
    tiles,
    splits,
    scale,
    cap,
    left,
    right,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of rows (query i, head g of the group: row i * GROUP + g) over one split of the keys they see. out is
    contiguous [B, Sq, Hq, Dv]; with SPLIT the parts go to float32 partial [B, Sq, Hq, splits, Dv] and partial_lse
    [B, Sq, Hq, splits] (log2) for `combine_kernel`."""
    program = tl.program_id(0)
    split = tl.program_id(1)
    tile = program % tiles
    kv_head = program // tiles % kv_heads
    row = (program // tiles // kv_heads).to(tl.int64)

    length = seqlen_k
    if cache_seqlens is not None:
        length = tl.load(cache_seqlens + row)
        length = tl.minimum(tl.where(length < 0, 0, length + appended), seqlen_k)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < seqlen_q * GROUP
    query_index = m // GROUP
    head = kv_head * GROUP + m % GROUP

    # Row r sees the keys [low, high); the tile visits [begin, end) and this program its share [first, last) of them.
    shift = length - seqlen_q
    low = tl.zeros([BLOCK_M], tl.int32)
    high = tl.zeros([BLOCK_M], tl.int32) + length
    begin = 0
    end = length
    if HAS_LEFT:
        low = tl.maximum(query_index + shift - left, 0)
        begin = tl.maximum(tile * BLOCK_M // GROUP + shift - left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(query_index + shift + right + 1, length)
        last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, seqlen_q - 1)
        end = tl.minimum(last_query + shift + right + 1, length)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N), splits) * BLOCK_N
    first = begin + split * share
    last = tl.minimum(first + share, end)

    k += tl.cast(kv_head, tl.int64) * stride_kh
    v += tl.cast(kv_head, tl.int64) * stride_vh
    if PAGE_SIZE == 0:
        k += row * stride_kb
        v += row * stride_vb
    else:
        block_table += row * stride_table
    rows = q + row * stride_qb + query_index.to(tl.int64) * stride_qt + head * stride_qh
    query = load_rows(rows, valid, True, HEAD_DIM, BLOCK_D)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_rows, v_rows, present = locate_keys(
            k, v, block_table, start, length, stride_kb, stride_kt, stride_vb, stride_vt, PAGE_SIZE, BLOCK_N
        )
        s = scores(query, load_rows(k_rows, present, True, HEAD_DIM, BLOCK_D), scale, cap, SOFTCAP)
        key = start + tl.arange(0, BLOCK_N)
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]) & present[None, :]
        s = tl.where(seen, s, float("-inf"))
        values = load_rows(v_rows, present, True, VALUE_DIM, BLOCK_DV)
        acc, total, maximum = softmax_step(s, values, acc, total, maximum, scale, SOFTCAP)

    index = (row * seqlen_q + query_index) * (kv_heads * GROUP) + head
    column = tl.arange(0, BLOCK_DV)
    inside = valid[:, None] & (column < VALUE_DIM)[None, :]
    if SPLIT:
        index = index * splits + split
        divisor = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(partial_lse + index, lse, mask=valid)
        acc = acc / divisor[:, None]
        if first < last:
            tl.store(partial + (index * VALUE_DIM)[:, None] + column[None, :], acc, mask=inside)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            base = tl.maximum(maximum, sink)
            base = tl.where(base == float("-inf"), 0.0, base)
            shrink = tl.exp2(maximum - base)
            acc = acc * shrink[:, None]
            total = total * shrink + tl.exp2(sink - base)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        pointers = out + (index * VALUE_DIM)[:, None] + column[None, :]
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "heads"])
def combine_kernel(
    partial,
    partial_lse,
    out,
    sinks,
    splits,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEP: tl.constexpr,
):
    """One query and head: the parts of all splits weighted by their share of the softmax sum. Parts whose lse is -inf saw
    no key and are not read."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    lse = tl.load(partial_lse + index * splits + split, mask=split < splits, other=float("-inf"))
    maximum = tl.max(lse, 0)
    if sinks is not None:
        sink = tl.load(sinks + index % heads).to(tl.float32) * 1.4426950408889634
        maximum = tl.maximum(maximum, sink)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp2(lse - maximum), 0)
    if sinks is not None:
        total += tl.exp2(sink - maximum)

    column = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in tl.range(0, splits, STEP):
        part = start + tl.arange(0, STEP)
        part_lse = tl.load(partial_lse + index * splits + part, mask=part < splits, other=float("-inf"))
        inside = (part_lse > float("-inf"))[:, None] & (column < VALUE_DIM)[None, :]
        pointers = partial + ((index * splits + part) * VALUE_DIM)[:, None] + column[None, :]
        acc += tl.sum(tl.load(pointers, mask=inside, other=0.0) * tl.exp2(part_lse - maximum)[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + index * VALUE_DIM + column, acc.to(out.dtype.element_ty), mask=column < VALUE_DIM)


def is_decode(queries: int, group: int) -> bool:
    """Whether so few queries per row are better served by `attend_few` than by forward.attend."""
    return queries <= 16 or queries * group <= 128


def attend_few(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    s_aux: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    appended: int = 0,
    block_table: torch.Tensor | None = None,
    return_lse: bool = False,
    quantized: QuantizedKV | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launches `decode_kernel` and, when keys are split, `combine_kernel` on checked arguments. q [B, Sq, Hq, D]; k and v
    are [B, Sk, Hk, D], or pages with block_table; cache_seqlens None means Sk keys in every row. window -1 is no limit.
    Returns out [B, Sq, Hq, Dv] in the dtype of q and, with return_lse, the float32 [B, Hq, Sq] log-sum-exp of the scores."""
    if alibi_slopes is not None or tree_mask is not None or return_lse or quantized is not None:
        raise NotImplementedError("alibi_slopes, tree_mask, return_lse and quantized caches")
    rows, queries, heads, head_dim = q.shape
    kv_heads, value_dim = k.shape[2], v.shape[3]
    out = torch.empty((rows, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out, None
    group = heads // kv_heads
    config = decode_config(q.dtype, max(head_dim, value_dim), queries * group)
    tiles = triton.cdiv(queries * group, config.block_m)
    paged = block_table is not None
    capacity = block_table.shape[1] * k.shape[1] if paged else k.shape[1]
    programs = rows * kv_heads * tiles
    splits = min(triton.cdiv(2 * processors(q.device), programs), triton.cdiv(capacity, _KEYS_PER_SPLIT), MAX_SPLITS)
    splits = max(splits, 1)
    partial = partial_lse = None
    if splits > 1:
        partial = torch.empty((rows, queries, heads, splits, value_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((rows, queries, heads, splits), dtype=torch.float32, device=q.device)
    scale, cap = score_scales(softmax_scale, softcap)
    block_dv = max(16, triton.next_power_of_2(value_dim))
    with launch_device(q):
        decode_kernel[(programs, splits)](
            q,
            k,
            v,
            out,
            partial,
            partial_lse,
            s_aux,
            cache_seqlens,
            block_table,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            block_table.stride(0) if paged else 0,
            queries,
            capacity,
            appended,
            kv_heads,
            tiles,
            splits,
            scale,
            cap,
            *window,
            GROUP=group,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_DV=block_dv,
            PAGE_SIZE=k.shape[1] if paged else 0,
            HAS_LEFT=window[0] >= 0,
            HAS_RIGHT=window[1] >= 0,
            SOFTCAP=softcap > 0,
            SPLIT=splits > 1,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if splits > 1:
            combine_kernel[(rows * queries * heads,)](
                partial,
                partial_lse,
                out,
                s_aux,
                splits,
                heads,
                VALUE_DIM=value_dim,
                BLOCK_DV=block_dv,
                BLOCK_S=triton.next_power_of_2(splits),
                STEP=min(16, triton.next_power_of_2(splits)),
                num_warps=4,
            )
    return out, None
