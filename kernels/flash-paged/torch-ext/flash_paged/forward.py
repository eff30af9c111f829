"""Attention of many queries: one program computes BLOCK_M queries of one head and walks over the keys they can see.

FlashAttention-2 (https://arxiv.org/abs/2307.08691): online softmax, no [Sq, Sk] matrix in memory. Blocks of keys that
no query of the tile sees are never visited; only blocks at an edge (causal, window, end) pay for masks.

Head dims that are no power of two are computed in two parts (96 = 64 + 32, see `split_dim`), so that the matrix units
multiply few zeros.
"""

import torch
import triton
import triton.language as tl

from .config import forward_config, gpu_kind, launch_device
from .forward_launch import lse_strides, most_are_empty, packed_tiles, pairs_a_section, token_strides
from .tiles import (
    cap_scores,
    dot,
    load_rows,
    locate_keys,
    packed_tile,
    program_tile,
    score_scales,
    softmax_weights,
    split_dim,
    subtract_alibi,
)


@triton.jit
def _walk(
    q, q_rest, k, v, block_table, acc, acc_rest, total, maximum, first, last, length, low, high, position, slope,
    stride_kb, stride_kt, stride_vb, stride_vt,
    scale, cap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The keys first..last in steps of BLOCK_N. MASKED: row r sees only keys in [low[r], high[r])."""
    CHECK: tl.constexpr = MASKED or PAGE_SIZE > 0
    for start in tl.range(first, last, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        k_rows, v_rows, present = locate_keys(
            k, v, block_table, start, length, stride_kb, stride_kt, stride_vb, stride_vt, PAGE_SIZE, BLOCK_N
        )
        s = dot(q, tl.trans(load_rows(k_rows, present, CHECK, min(HEAD_DIM, BLOCK_D), BLOCK_D)))
        if REST_D:
            s = dot(q_rest, tl.trans(load_rows(k_rows + BLOCK_D, present, CHECK, HEAD_DIM - BLOCK_D, REST_D)), s)
        key = start + tl.arange(0, BLOCK_N)
        if SOFTCAP:
            s = cap_scores(s, scale, cap)
        if ALIBI:
            s = subtract_alibi(s, slope, position, key, scale, SOFTCAP)
        if MASKED:
            seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]) & present[None, :]
            s = tl.where(seen, s, float("-inf"))
        elif PAGE_SIZE > 0:
            s = tl.where(present[None, :], s, float("-inf"))
        p, shrink, total, maximum = softmax_weights(s, total, maximum, scale, SOFTCAP or ALIBI)
        p = p.to(v.dtype.element_ty)
        acc = dot(p, load_rows(v_rows, present, CHECK, min(VALUE_DIM, BLOCK_DV), BLOCK_DV), acc * shrink[:, None])
        if REST_DV:
            tile = load_rows(v_rows + BLOCK_DV, present, CHECK, VALUE_DIM - BLOCK_DV, REST_DV)
            acc_rest = dot(p, tile, acc_rest * shrink[:, None])
    return acc, acc_rest, total, maximum


@triton.jit
def _store_rows(rows, tile, present, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    column = tl.arange(0, BLOCK_DIM)
    mask = present[:, None] & (column < DIM)[None, :]
    tl.store(rows[:, None] + column[None, :], tile.to(rows.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "appended",
        "left",
        "right",
        "tiles",
        "heads",
        "pairs",
        "section",
        "fewest",
    ]  # fmt: skip
)
def forward_kernel(
    q, k, v, out, lse, sinks, slopes, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_ob,
    stride_ot, stride_oh, stride_table, stride_lb, stride_lh, stride_slopes,
    seqlen_q, seqlen_k, appended, heads, tiles, pairs, section, fewest, scale, cap, left, right,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Query lengths: cu_seqlens_q or seqlen_q. Key lengths: cache_seqlens plus `appended`, cu_seqlens_k or seqlen_k;
    with pages seqlen_k is what a row of the block table holds. Absent pointers are None. SEARCH: programs are `heads`
    times the tiles that all packed sequences can have, and each finds its own (`packed_tile`) among those of at least
    `fewest` queries."""
    if SEARCH:
        head = tl.program_id(0) % heads
        sequence, tile = packed_tile(tl.program_id(0) // heads, cu_seqlens_q, pairs // heads, fewest, BLOCK_M)
    else:
        tile, pair = program_tile(tl.program_id(0), tiles, pairs, section)
        head = pair % heads
        sequence = pair // heads
    sequence = sequence.to(tl.int64)

    first_q = 0
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + sequence)
        seqlen_q = tl.load(cu_seqlens_q + sequence + 1) - first_q
    first_m = tile * BLOCK_M
    if first_m >= seqlen_q:
        return

    first_k = 0
    length = seqlen_k
    if cache_seqlens is not None:
        length = tl.load(cache_seqlens + sequence)
        length = tl.minimum(tl.where(length < 0, 0, length + appended), seqlen_k)
    elif cu_seqlens_k is not None:
        first_k = tl.load(cu_seqlens_k + sequence)
        length = tl.load(cu_seqlens_k + sequence + 1) - first_k
        if PAGE_SIZE > 0:
            length = tl.minimum(length, seqlen_k)

    m = first_m + tl.arange(0, BLOCK_M)
    kv_head = (head // GROUP).to(tl.int64)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    if PAGE_SIZE == 0:
        k += sequence * stride_kb + tl.cast(first_k, tl.int64) * stride_kt
        v += sequence * stride_vb + tl.cast(first_k, tl.int64) * stride_vt
    else:
        block_table += sequence * stride_table
    q += sequence * stride_qb + tl.cast(first_q + first_m, tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    rows = q + tl.arange(0, BLOCK_M) * stride_qt
    query = load_rows(rows, m < seqlen_q, True, min(HEAD_DIM, BLOCK_D), BLOCK_D)
    query_rest = query
    if REST_D:
        query_rest = load_rows(rows + BLOCK_D, m < seqlen_q, True, HEAD_DIM - BLOCK_D, REST_D)

    # Row r sees the keys [low, high). The tile visits [begin, end), of which all rows see all of [inner, outer).
    shift = length - seqlen_q
    position = m + shift
    low = tl.zeros([BLOCK_M], tl.int32)
    high = tl.zeros([BLOCK_M], tl.int32) + length
    begin = 0
    end = length
    inner = 0
    outer = length
    if HAS_LEFT:
        low = tl.maximum(position - left, 0)
        begin = tl.maximum(first_m + shift - left, 0) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(tl.maximum(first_m + BLOCK_M - 1 + shift - left, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        high = tl.minimum(position + right + 1, length)
        end = tl.minimum(tl.minimum(first_m + BLOCK_M, seqlen_q) + shift + right, length)
        outer = tl.minimum(tl.maximum(first_m + shift + right + 1, 0), length)
    outer = tl.maximum(outer // BLOCK_N * BLOCK_N, begin)
    inner = tl.minimum(inner, outer)

    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + sequence * stride_slopes + head) * 1.4426950408889634
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    acc_rest = acc
    if REST_DV:
        acc_rest = tl.zeros([BLOCK_M, REST_DV], tl.float32)
    if sinks is not None:
        maximum = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    # before the window's edge has passed all rows, between the edges, and from the first row's last key on
    for part in tl.static_range(3):
        if HAS_LEFT or part > 0:
            acc, acc_rest, total, maximum = _walk(
                query, query_rest, k, v, block_table, acc, acc_rest, total, maximum,
                begin if part == 0 else (inner if part == 1 else outer),
                inner if part == 0 else (outer if part == 1 else end),
                length, low, high, position, slope, stride_kb, stride_kt, stride_vb, stride_vt, scale, cap,
                part != 1, SOFTCAP, slopes is not None,
                HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, REST_D, BLOCK_DV, REST_DV, PAGE_SIZE,
            )  # fmt: skip

    divisor = tl.where(total == 0.0, 1.0, total)
    if lse is not None:
        lse += sequence * stride_lb + head.to(tl.int64) * stride_lh + first_q
        tl.store(lse + m, (maximum + tl.log2(divisor)) * 0.6931471805599453, mask=m < seqlen_q)
    out += sequence * stride_ob + tl.cast(first_q + first_m, tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    rows = out + tl.arange(0, BLOCK_M) * stride_ot
    _store_rows(rows, acc / divisor[:, None], m < seqlen_q, min(VALUE_DIM, BLOCK_DV), BLOCK_DV)
    if REST_DV:
        _store_rows(rows + BLOCK_DV, acc_rest / divisor[:, None], m < seqlen_q, VALUE_DIM - BLOCK_DV, REST_DV)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int, *, softmax_scale: float,
    window: tuple[int, int], softcap: float, s_aux: torch.Tensor | None, alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None, appended: int = 0, block_table: torch.Tensor | None = None,
    return_lse: bool = False, fewest: int = 0,
    into: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Launches `forward_kernel` on checked arguments. Returns (out, softmax_lse or None).

    q is [B, Sq, Hq, D], or [Tq, Hq, D] with cu_seqlens_q. k and v are [B, Sk, Hk, D], [Tk, Hk, D] with cu_seqlens_k, or
    pages with block_table. window -1 is no limit. alibi_slopes is float32 [Hq] or [B, Hq]. softmax_lse is float32 [B,
    Hq, Sq], or [Hq, Tq] with cu_seqlens_q: natural logarithm, sinks included, -inf for a query that sees nothing.
    fewest: with more than 0 packed sequences of fewer queries keep the results that `into` holds.
    """
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    heads, kv_heads, head_dim, value_dim = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    lse_shape = (heads, q.shape[0]) if q.dim() == 3 else (batch, heads, q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
    if into is not None:
        out, lse = into
    if out.numel() == 0 or batch == 0 or max_seqlen_q == 0:
        return out, lse
    paged = block_table is not None
    kind = gpu_kind(q.device)
    keys = block_table.shape[1] * k.shape[1] if paged else k.shape[-3]
    page_size = k.shape[1] if paged else 0
    config = forward_config(q.dtype, max(head_dim, value_dim), max_seqlen_q, page_size, kind)
    tiles = triton.cdiv(max_seqlen_q, config.block_m)
    is_mixed = fewest > 0 or (cu_seqlens_q is not None and most_are_empty(q.shape[0], batch, tiles, config.block_m))
    programs = packed_tiles(q.shape[0], batch, config.block_m) if is_mixed else tiles * batch
    scale, cap = score_scales(softmax_scale, softcap)
    block_d, rest_d = split_dim(head_dim)
    block_dv, rest_dv = split_dim(value_dim)
    with launch_device(q):
        forward_kernel[(programs * heads,)](
            q, k, v, out, lse, s_aux, alibi_slopes, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table,
            *token_strides(q), *token_strides(k), *token_strides(v), *token_strides(out),
            block_table.stride(0) if paged else 0, *lse_strides(lse),
            alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
            max_seqlen_q, keys, appended, heads, tiles, batch * heads,
            pairs_a_section(q, k, v, batch, keys) if window[1] >= 0 else 1, fewest, scale, cap, *window,
            GROUP=heads // kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_D=block_d, REST_D=rest_d, BLOCK_DV=block_dv, REST_DV=rest_dv,
            PAGE_SIZE=page_size, HAS_LEFT=window[0] >= 0, HAS_RIGHT=window[1] >= 0, SOFTCAP=softcap > 0,
            SEARCH=is_mixed, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse
