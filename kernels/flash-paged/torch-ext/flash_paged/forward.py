"""Attention of many queries: one program computes BLOCK_M queries of one head and walks over the keys they can see.

FlashAttention-2 (https://arxiv.org/abs/2307.08691): online softmax, no [Sq, Sk] matrix in memory. Blocks of keys that no
query of the tile sees are never visited; only blocks at an edge (causal, window, end) pay for masks.
"""

import torch
import triton
import triton.language as tl

from .config import forward_config, launch_device
from .tiles import load_rows, locate_keys, score_scales, scores, softmax_step, subtract_alibi


@triton.jit
def _walk(
    q,
    k,
    v,
    block_table,
    acc,
    total,
    maximum,
    first,
    last,
    length,
    low,
    high,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    scale,
    cap,
    slope,
    position,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """The keys first..last in steps of BLOCK_N. MASKED: row r sees only keys in [low[r], high[r])."""
    CHECK: tl.constexpr = MASKED or PAGE_SIZE > 0
    for start in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_rows, v_rows, present = locate_keys(
            k, v, block_table, start, length, stride_kb, stride_kt, stride_vb, stride_vt, PAGE_SIZE, BLOCK_N
        )
        s = scores(q, load_rows(k_rows, present, CHECK, HEAD_DIM, BLOCK_D), scale, cap, SOFTCAP)
        key = start + tl.arange(0, BLOCK_N)
        if ALIBI:
            s = subtract_alibi(s, slope, position, key, scale, SOFTCAP)
        if MASKED:
            seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]) & present[None, :]
            s = tl.where(seen, s, float("-inf"))
        elif PAGE_SIZE > 0:
            s = tl.where(present[None, :], s, float("-inf"))
        tile = load_rows(v_rows, present, CHECK, VALUE_DIM, BLOCK_DV)
        acc, total, maximum = softmax_step(s, tile, acc, total, maximum, scale, SOFTCAP or ALIBI)
    return acc, total, maximum


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "appended", "left", "right", "tiles", "heads"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    sinks,
    slopes,
    cu_seqlens_q,
    cu_seqlens_k,
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
    stride_ob,
    stride_ot,
    stride_oh,
    stride_table,
    stride_lb,
    stride_lh,
    stride_slopes,
    seqlen_q,
    seqlen_k,
    appended,
    heads,
    tiles,
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
):
    """Query lengths: cu_seqlens_q or seqlen_q. Key lengths: cache_seqlens plus `appended`, cu_seqlens_k or seqlen_k;
    with pages seqlen_k is what a row of the block table holds. Absent pointers are None."""
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # under a causal mask the last tile is the longest: it starts first
    head = (program // tiles) % heads
    row = (program // tiles // heads).to(tl.int64)

    first_q = 0
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + row)
        seqlen_q = tl.load(cu_seqlens_q + row + 1) - first_q
    first_m = tile * BLOCK_M
    if first_m >= seqlen_q:
        return

    first_k = 0
    length = seqlen_k
    if cache_seqlens is not None:
        length = tl.load(cache_seqlens + row)
        length = tl.minimum(tl.where(length < 0, 0, length + appended), seqlen_k)
    elif cu_seqlens_k is not None:
        first_k = tl.load(cu_seqlens_k + row)
        length = tl.load(cu_seqlens_k + row + 1) - first_k
        if PAGE_SIZE > 0:
            length = tl.minimum(length, seqlen_k)

    m = first_m + tl.arange(0, BLOCK_M)
    kv_head = (head // GROUP).to(tl.int64)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    if PAGE_SIZE == 0:
        k += row * stride_kb + tl.cast(first_k, tl.int64) * stride_kt
        v += row * stride_vb + tl.cast(first_k, tl.int64) * stride_vt
    else:
        block_table += row * stride_table
    q += row * stride_qb + tl.cast(first_q + first_m, tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    query = load_rows(q + tl.arange(0, BLOCK_M) * stride_qt, m < seqlen_q, True, HEAD_DIM, BLOCK_D)

    # Row r sees the keys [low, high). The tile visits [begin, end), of which all rows see all of [inner, outer).
    shift = length - seqlen_q
    low = tl.zeros([BLOCK_M], tl.int32)
    high = tl.zeros([BLOCK_M], tl.int32) + length
    begin = 0
    end = length
    inner = 0
    outer = length
    if HAS_LEFT:
        low = tl.maximum(m + shift - left, 0)
        begin = tl.maximum(first_m + shift - left, 0) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(tl.maximum(first_m + BLOCK_M - 1 + shift - left, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(m + shift + right + 1, length)
        end = tl.minimum(tl.minimum(first_m + BLOCK_M, seqlen_q) + shift + right, length)
        outer = tl.minimum(tl.maximum(first_m + shift + right + 1, 0), length)
    outer = tl.maximum(outer // BLOCK_N * BLOCK_N, begin)
    inner = tl.minimum(inner, outer)

    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + row * stride_slopes + head) * 1.4426950408889634
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sinks is not None:
        maximum = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    if HAS_LEFT:
        acc, total, maximum = _walk(
            query, k, v, block_table, acc, total, maximum, begin, inner, length, low, high,
            stride_kb, stride_kt, stride_vb, stride_vt, scale, cap, slope, m + shift,
            True, SOFTCAP, slopes is not None, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PAGE_SIZE,
        )  # fmt: skip
    acc, total, maximum = _walk(
        query, k, v, block_table, acc, total, maximum, inner, outer, length, low, high,
        stride_kb, stride_kt, stride_vb, stride_vt, scale, cap, slope, m + shift,
        False, SOFTCAP, slopes is not None, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PAGE_SIZE,
    )  # fmt: skip
    acc, total, maximum = _walk(
        query, k, v, block_table, acc, total, maximum, outer, end, length, low, high,
        stride_kb, stride_kt, stride_vb, stride_vt, scale, cap, slope, m + shift,
        True, SOFTCAP, slopes is not None, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PAGE_SIZE,
    )  # fmt: skip

    divisor = tl.where(total == 0.0, 1.0, total)
    if lse is not None:
        lse += row * stride_lb + tl.cast(first_q, tl.int64) + head.to(tl.int64) * stride_lh
        tl.store(lse + m, (maximum + tl.log2(divisor)) * 0.6931471805599453, mask=m < seqlen_q)
    acc = acc / divisor[:, None]
    out += row * stride_ob + tl.cast(first_q + first_m, tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    column = tl.arange(0, BLOCK_DV)
    pointers = out + (tl.arange(0, BLOCK_M) * stride_ot)[:, None] + column[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(m < seqlen_q)[:, None] & (column < VALUE_DIM)[None, :])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    *,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    s_aux: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    appended: int = 0,
    block_table: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launches `forward_kernel` on checked arguments -> (out, softmax_lse or None).

    q is [B, Sq, Hq, D], or [Tq, Hq, D] with cu_seqlens_q; k and v are [B, Sk, Hk, D], [Tk, Hk, D] with cu_seqlens_k, or
    pages with block_table. window -1 is no limit. alibi_slopes: float32 [Hq] or [B, Hq]. softmax_lse: float32 [B, Hq, Sq],
    or [Hq, Tq] with cu_seqlens_q, natural logarithm, sinks included, -inf for a query that sees nothing."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    heads, kv_heads, head_dim, value_dim = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    rows = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    lse = None
    if return_lse:
        shape = (heads, q.shape[0]) if q.dim() == 3 else (rows, heads, q.shape[1])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or rows == 0 or max_seqlen_q == 0:
        return out, lse
    config = forward_config(q.dtype, max(head_dim, value_dim), max_seqlen_q)
    tiles = triton.cdiv(max_seqlen_q, config.block_m)
    scale, cap = score_scales(softmax_scale, softcap)
    paged = block_table is not None
    with launch_device(q):
        forward_kernel[(tiles * heads * rows,)](
            q,
            k,
            v,
            out,
            lse,
            s_aux,
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_k,
            cache_seqlens,
            block_table,
            *((0, *q.stride()[:2]) if q.dim() == 3 else q.stride()[:3]),
            *((0, *k.stride()[:2]) if k.dim() == 3 else k.stride()[:3]),
            *((0, *v.stride()[:2]) if v.dim() == 3 else v.stride()[:3]),
            *((0, *out.stride()[:2]) if out.dim() == 3 else out.stride()[:3]),
            block_table.stride(0) if paged else 0,
            *((0, lse.stride(0)) if q.dim() == 3 else lse.stride()[:2]) if return_lse else (0, 0),
            alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
            max_seqlen_q,
            block_table.shape[1] * k.shape[1] if paged else k.shape[-3],
            appended,
            heads,
            tiles,
            scale,
            cap,
            *window,
            GROUP=heads // kv_heads,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
            PAGE_SIZE=k.shape[1] if paged else 0,
            HAS_LEFT=window[0] >= 0,
            HAS_RIGHT=window[1] >= 0,
            SOFTCAP=softcap > 0,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, lse
