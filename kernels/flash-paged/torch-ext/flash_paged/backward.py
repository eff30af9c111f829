"""Gradients of attention without pages: FlashAttention-2's backward (https://arxiv.org/abs/2307.08691, algorithm 2).

The weights are computed again from the scores and the log-sum-exp, so that no [Sq, Sk] matrix is in memory. One kernel
walks over the queries that see a block of keys and sums the gradients of its keys and values over the heads that share
them; another walks over the keys that a tile of queries sees. Nothing is added atomically: the result is deterministic.
"""

import torch
import triton
import triton.language as tl

from .config import Config, backward_config, gpu_kind, launch_device
from .forward_launch import lse_strides, token_strides
from .tiles import cap_scores, dot, load_rows, score_scales


@triton.jit
def _score_gradients(
    left_of_scores, right_of_scores, left_of_weights, right_of_weights, lse, delta, position, key, length, slope,
    scale, cap, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the gradients of its scores before softmax_scale. [M, N] from queries times keys and
    grad_out times values, with lse, delta and position [M, 1] and key [1, N]; or [N, M] from keys times queries, with
    the others turned likewise. lse is in powers of two, 0 for a query that sees nothing; rows without a query have zero
    grad_out and delta."""
    s = dot(left_of_scores, tl.trans(right_of_scores))
    slant = 1.0
    if SOFTCAP:
        s = cap_scores(s, scale, cap)
        slant = 1.0 - (s / cap) * (s / cap)
    else:
        s = s * scale
    if ALIBI:
        s = s - slope * tl.abs(position - key).to(tl.float32)
    seen = key < length
    if HAS_LEFT:
        seen = seen & (key >= position - left)
    if HAS_RIGHT:
        seen = seen & (key <= position + right)
    p = tl.where(seen, tl.exp2(s - lse), 0.0)
    ds = p * (dot(left_of_weights, tl.trans(right_of_weights)) - delta)
    if SOFTCAP:
        ds = ds * slant
    return p, ds


@triton.jit
def _place(seqlen, heads, BLOCK: tl.constexpr):
    """(block of tokens, head, sequence) of a program; the blocks of a head follow each other. All lie in the first
    dimension of the grid: the others end at 65535."""
    blocks = tl.cdiv(seqlen, BLOCK)
    pair = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, (pair % heads).to(tl.int64), (pair // heads).to(tl.int64)


@triton.jit
def _sequence(cu_seqlens, seqlen, sequence):
    """(first token, tokens) of a sequence: of packed ones, or of rows of `seqlen` tokens."""
    first = sequence * seqlen
    length = seqlen
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1) - first).to(tl.int32)
    return first, length


@triton.jit
def _rows(x, first, start, heads, head, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to rows of a contiguous tensor [tokens, heads, DIM]."""
    return x + ((first + start + tl.arange(0, BLOCK)) * heads + head) * DIM


@triton.jit
def _store(rows, tile, present, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    column = tl.arange(0, BLOCK_DIM)
    pointers = rows[:, None] + column[None, :]
    tl.store(pointers, tile.to(rows.dtype.element_ty), mask=present[:, None] & (column < DIM)[None, :])


@triton.jit(do_not_specialize=["seqlen_q", "heads"])
def delta_kernel(
    out, grad_out, grad_lse, delta, cu_seqlens_q, stride_gb, stride_gt, stride_gh, stride_lb, stride_lh,
    stride_db, stride_dh, seqlen_q, heads,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta [M]: out times its gradient, summed over a head's channels, less the gradient of the log-sum-exp."""
    block, head, sequence = _place(seqlen_q, heads, BLOCK_M)
    first, queries = _sequence(cu_seqlens_q, seqlen_q, sequence)
    start = block * BLOCK_M
    if start >= queries:
        return
    m = start + tl.arange(0, BLOCK_M)
    of_packed = first if cu_seqlens_q is not None else 0
    grad_out += sequence * stride_gb + of_packed * stride_gt + head * stride_gh
    given = load_rows(grad_out + m.to(tl.int64) * stride_gt, m < queries, True, VALUE_DIM, BLOCK_DV).to(tl.float32)
    own = load_rows(_rows(out, first, start, heads, head, VALUE_DIM, BLOCK_M), m < queries, True, VALUE_DIM, BLOCK_DV)
    value = tl.sum(own.to(tl.float32) * given, 1)
    if grad_lse is not None:
        value -= tl.load(
            grad_lse + sequence * stride_lb + head * stride_lh + of_packed + m, mask=m < queries, other=0.0
        )
    tl.store(delta + sequence * stride_db + head * stride_dh + of_packed + m, value, mask=m < queries)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "left", "right", "kv_heads"])
def keys_kernel(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, slopes, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_lb, stride_lh, stride_slopes,
    seqlen_q, seqlen_k, kv_heads, softmax_scale, scale, cap, left, right,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_N keys and values of one key head."""
    block, kv_head, sequence = _place(seqlen_k, kv_heads, BLOCK_N)
    first_k, length = _sequence(cu_seqlens_k, seqlen_k, sequence)
    start_n = block * BLOCK_N
    if start_n >= length:
        return
    first_q, queries = _sequence(cu_seqlens_q, seqlen_q, sequence)
    offset_q = first_q if cu_seqlens_q is not None else 0
    offset_k = first_k if cu_seqlens_k is not None else 0
    key = start_n + tl.arange(0, BLOCK_N)
    k += sequence * stride_kb + offset_k * stride_kt + kv_head * stride_kh
    v += sequence * stride_vb + offset_k * stride_vt + kv_head * stride_vh
    key_tile = load_rows(k + key.to(tl.int64) * stride_kt, key < length, True, HEAD_DIM, BLOCK_D)
    value_tile = load_rows(v + key.to(tl.int64) * stride_vt, key < length, True, VALUE_DIM, BLOCK_DV)
    sum_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Query m stands at m + shift. Those that see a key of the block are [begin, end).
    shift = length - queries
    begin = 0
    end = queries
    if HAS_RIGHT:
        begin = tl.maximum(start_n - right - shift, 0) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        end = tl.minimum(tl.maximum(start_n + BLOCK_N + left - shift, 0), queries)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        of_head = q + sequence * stride_qb + offset_q * stride_qt + head * stride_qh
        given_of_head = grad_out + sequence * stride_gb + offset_q * stride_gt + head * stride_gh
        number = sequence * stride_lb + head * stride_lh + offset_q
        slope = 0.0
        if slopes is not None:
            slope = tl.load(slopes + sequence * stride_slopes + head) * 1.4426950408889634
        for start in tl.range(begin, end, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            rows = m.to(tl.int64)
            tile = load_rows(of_head + rows * stride_qt, m < queries, True, HEAD_DIM, BLOCK_D)
            given = load_rows(given_of_head + rows * stride_gt, m < queries, True, VALUE_DIM, BLOCK_DV)
            total = tl.load(lse + number + m, mask=m < queries, other=0.0)
            total = tl.where(total == float("-inf"), 0.0, total * 1.4426950408889634)
            change = tl.load(delta + number + m, mask=m < queries, other=0.0)
            p, ds = _score_gradients(
                key_tile, tile, value_tile, given, total[None, :], change[None, :], (m + shift)[None, :], key[:, None],
                length, slope, scale, cap, left, right, HAS_LEFT, HAS_RIGHT, SOFTCAP, slopes is not None,
            )  # fmt: skip
            sum_v = dot(p.to(given.dtype), given, sum_v)
            sum_k = dot(ds.to(tile.dtype), tile, sum_k)
    present = key < length
    rows = _rows(grad_k, first_k, start_n, kv_heads, kv_head, HEAD_DIM, BLOCK_N)
    _store(rows, sum_k * softmax_scale, present, HEAD_DIM, BLOCK_D)
    rows = _rows(grad_v, first_k, start_n, kv_heads, kv_head, VALUE_DIM, BLOCK_N)
    _store(rows, sum_v, present, VALUE_DIM, BLOCK_DV)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "left", "right", "heads"])
def queries_kernel(
    q, k, v, grad_out, lse, delta, grad_q, sinks, grad_sinks, slopes, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_lb, stride_lh, stride_slopes,
    seqlen_q, seqlen_k, heads, softmax_scale, scale, cap, left, right,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_M queries of one head, and what each query adds to that of the head's sink: its weight
    times -delta."""
    block, head, sequence = _place(seqlen_q, heads, BLOCK_M)
    first_q, queries = _sequence(cu_seqlens_q, seqlen_q, sequence)
    start_m = block * BLOCK_M
    if start_m >= queries:
        return
    first_k, length = _sequence(cu_seqlens_k, seqlen_k, sequence)
    offset_q = first_q if cu_seqlens_q is not None else 0
    offset_k = first_k if cu_seqlens_k is not None else 0
    m = start_m + tl.arange(0, BLOCK_M)
    rows = m.to(tl.int64)
    q += sequence * stride_qb + offset_q * stride_qt + head * stride_qh
    grad_out += sequence * stride_gb + offset_q * stride_gt + head * stride_gh
    k += sequence * stride_kb + offset_k * stride_kt + head // GROUP * stride_kh
    v += sequence * stride_vb + offset_k * stride_vt + head // GROUP * stride_vh
    tile = load_rows(q + rows * stride_qt, m < queries, True, HEAD_DIM, BLOCK_D)
    given = load_rows(grad_out + rows * stride_gt, m < queries, True, VALUE_DIM, BLOCK_DV)
    number = sequence * stride_lb + head * stride_lh + offset_q + m
    total = tl.load(lse + number, mask=m < queries, other=0.0)
    change = tl.load(delta + number, mask=m < queries, other=0.0)
    if sinks is not None:
        share = tl.exp2((tl.load(sinks + head).to(tl.float32) - total) * 1.4426950408889634)
        tl.store(grad_sinks + number, -share * change, mask=m < queries)
    total = tl.where(total == float("-inf"), 0.0, total * 1.4426950408889634)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + sequence * stride_slopes + head) * 1.4426950408889634

    # Keys that a query of the tile sees are [begin, end).
    shift = length - queries
    begin = 0
    end = length
    if HAS_LEFT:
        begin = tl.maximum(start_m + shift - left, 0) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(tl.minimum(start_m + BLOCK_M, queries) + shift + right, length)
    sum_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        at = key.to(tl.int64)
        key_tile = load_rows(k + at * stride_kt, key < length, True, HEAD_DIM, BLOCK_D)
        value_tile = load_rows(v + at * stride_vt, key < length, True, VALUE_DIM, BLOCK_DV)
        p, ds = _score_gradients(
            tile, key_tile, given, value_tile, total[:, None], change[:, None], (m + shift)[:, None], key[None, :],
            length, slope, scale, cap, left, right, HAS_LEFT, HAS_RIGHT, SOFTCAP, slopes is not None,
        )  # fmt: skip
        sum_q = dot(ds.to(key_tile.dtype), key_tile, sum_q)
    _store(
        _rows(grad_q, first_q, start_m, heads, head, HEAD_DIM, BLOCK_M), sum_q * softmax_scale, m < queries, HEAD_DIM,
        BLOCK_D,
    )  # fmt: skip


def _tiles(config: Config) -> dict:
    return dict(
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages
    )  # fmt: skip


def attend_backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    window: tuple[int, int], softcap: float, s_aux: torch.Tensor | None, alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Launches the backward kernels on checked arguments: the gradients of q, k, v in their shapes and dtypes, and of
    s_aux or None. The shapes are those of `forward.attend`; out is contiguous, grad_out has its shape and dtype,
    grad_lse the shape of lse. Tokens behind the last packed sequence get zeros."""
    packed = cu_seqlens_q is not None
    heads, kv_heads, head_dim, value_dim = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    grad_q, grad_k, grad_v = (
        (torch.zeros if packed else torch.empty)(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    delta = torch.empty_like(lse)
    grad_sinks = None if s_aux is None else torch.zeros_like(lse)
    if batch and max_seqlen_q and q.numel():
        of_queries, of_keys = backward_config(q.dtype, max(head_dim, value_dim), gpu_kind(q.device))
        block_d, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
        scale, cap = score_scales(softmax_scale, softcap)
        slope_stride = alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0
        strides = *map(token_strides, (q, k, v, grad_out)), lse_strides(lse), (slope_stride,)
        strides = [number for numbers in strides for number in numbers]
        numbers = (softmax_scale, scale, cap, *window)
        options = dict(
            GROUP=heads // kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_D=block_d, BLOCK_DV=block_dv,
            HAS_LEFT=window[0] >= 0, HAS_RIGHT=window[1] >= 0, SOFTCAP=softcap > 0,
        )  # fmt: skip
        grid_q = (triton.cdiv(max_seqlen_q, of_queries.block_m) * heads * batch,)
        with launch_device(q):
            delta_kernel[grid_q](
                out, grad_out, grad_lse, delta, cu_seqlens_q, *token_strides(grad_out), *lse_strides(grad_lse),
                *lse_strides(delta), max_seqlen_q, heads, VALUE_DIM=value_dim, BLOCK_M=of_queries.block_m,
                BLOCK_DV=block_dv, num_warps=4,
            )  # fmt: skip
            queries_kernel[grid_q](
                q, k, v, grad_out, lse, delta, grad_q, s_aux, grad_sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
                *strides, max_seqlen_q, max_seqlen_k, heads, *numbers, **options, **_tiles(of_queries),
            )  # fmt: skip
            if max_seqlen_k:
                keys_kernel[(triton.cdiv(max_seqlen_k, of_keys.block_n) * kv_heads * batch,)](
                    q, k, v, grad_out, lse, delta, grad_k, grad_v, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
                    *strides, max_seqlen_q, max_seqlen_k, kv_heads, *numbers, **options, **_tiles(of_keys),
                )  # fmt: skip
    elif not packed:
        grad_k.zero_()
        grad_v.zero_()
    if s_aux is not None:
        grad_sinks = grad_sinks.sum([-1] if grad_sinks.dim() == 2 else [0, 2]).to(s_aux.dtype)
    return grad_q, grad_k, grad_v, grad_sinks
