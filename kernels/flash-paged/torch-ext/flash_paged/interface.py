"""The attention functions: they check their arguments, choose a kernel by shape and launch it. None waits for the GPU.

Common to all: dtypes float16, bfloat16 or float32 (the same for all tensors; float32 accumulation), head dims 1 to 256,
Hq a multiple of Hk (grouped-query attention), a contiguous last dimension and otherwise any strides.

softmax_scale: factor of the scores, by default D ** -0.5.
causal: query i stands at position i + Sk - Sq (bottom-right aligned) and sees no later key.
window_size: (left, right), a query sees the keys from position - left to position + right; -1 is no limit.
softcap: scores become softcap * tanh(scores / softcap); 0.0 is off.
alibi_slopes: float32 [Hq] or [B, Hq]; scores lose slope * |position - key| (https://arxiv.org/abs/2108.12409).
s_aux: [Hq] logits of learned sinks, which join the denominator of the softmax only. A query that sees no key gives 0.
The log-sum-exp, where asked for, is float32 [B, Hq, Sq] ([Hq, Tq] when packed), natural, with the sink, and -inf for a
query that sees no key and has no sink.

Errors: TypeError and ValueError name the argument, what was given and what is allowed; RuntimeError for inputs that
require grad while grad is enabled (`flash_attn_backward` is a function of its own). What lies in the integer tensors is
on the device and only checked with the environment variable FLASH_PAGED_DEBUG=1 (see debug_checks.py).
"""

import operator

import torch

from .cache_checks import check_cache, check_quantized, check_tails
from .cache_gather import gather_pages
from .cache_write import write
from .checks import (
    check_attention,
    check_device,
    check_heads,
    check_integers,
    check_no_grad,
    check_options,
    check_tensor,
    check_tree,
)
from .debug_checks import check_cumulative, check_lengths, check_numbers, check_ring
from .decode import attend_few, few_beside_many, is_decode, is_packed_decode
from .forward import attend
from .kv_formats import QuantizedKV
from .rotary import check_rotary, rotate_and_write


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:  # fmt: skip
    """Attention of q [B, Sq, Hq, D] over k [B, Sk, Hk, D] and v [B, Sk, Hk, Dv] -> [B, Sq, Hq, Dv].

    return_attn_probs: returns (out, log-sum-exp, None), as flash-attn without dropout. The result is always
    deterministic; `deterministic` is accepted because callers of flash-attn pass it. dropout_p must be 0.0. See
    https://arxiv.org/abs/2307.08691 and, for few queries, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    check_device(q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, 4, q)
    check_attention(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, expected {q.shape[0]} as q")
    options = check_options(
        q, q.shape[0], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_attn_probs
    )
    if is_decode(q.shape[1], q.shape[2] // k.shape[2]):
        out, lse = attend_few(q, k, v, **options)
    else:
        out, lse = attend(q, k, v, q.shape[1], **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:  # fmt: skip
    """Attention of B packed sequences: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] -> [Tq, Hq, Dv].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1], sequence b has tokens cu_seqlens[b] to cu_seqlens[b + 1]; tokens of the
    result behind the last sequence are not written.
    max_seqlen_q: the longest of the query lengths or more (a tensor works, but reading it waits for the GPU);
    max_seqlen_k is not needed.
    block_table: int32 [B, max_blocks]; then k and v are pages [num_blocks, block_size, Hk, D or Dv], cu_seqlens_k gives
    only the lengths, and keys in pages named -1 are not seen (their pages are never read).
    return_attn_probs, deterministic and dropout_p: as in `flash_attn_func`.
    """
    check_device(q)
    pages = 3 if block_table is None else 4
    for name, tensor, dims in (("q", q, 3), ("k", k, pages), ("v", v, pages)):
        check_tensor(name, tensor, dims, q)
    check_attention(q, k, v)
    check_integers("cu_seqlens_q", cu_seqlens_q, 1, q)
    check_integers("cu_seqlens_k", cu_seqlens_k, 1, q, length=cu_seqlens_q.shape[0])
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q has shape (0,), expected one more element than there are sequences")
    if block_table is not None:
        check_integers("block_table", block_table, 2, q, length=batch)
        check_numbers("block_table", block_table, k.shape[0], "blocks of k")
        check_cumulative("cu_seqlens_k", cu_seqlens_k, longest=block_table.shape[1] * k.shape[1])
    else:
        check_cumulative("cu_seqlens_k", cu_seqlens_k, end=k.shape[0])
    max_seqlen_q = operator.index(max_seqlen_q)
    check_cumulative("cu_seqlens_q", cu_seqlens_q, end=q.shape[0], longest=max_seqlen_q)
    options = check_options(
        q, batch, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_attn_probs
    )
    if block_table is not None and is_packed_decode(max_seqlen_q, q.shape[1] // k.shape[2]):
        lengths = {"cache_seqlens": cu_seqlens_k.diff(), "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        out, lse = attend_few(q, k, v, block_table=block_table, **lengths, **options)
    else:
        few, short = 0, None
        if block_table is not None:
            few = few_beside_many(q.shape[0], batch, max_seqlen_q, q.shape[1] // k.shape[2])
        if few:  # its zeros for the long ones are written over
            seen = torch.where(cu_seqlens_q.diff() <= few, cu_seqlens_k.diff(), 0)
            lengths = {"cache_seqlens": seen, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": few}
            short = attend_few(q, k, v, block_table=block_table, **lengths, **options)
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        beside = {"fewest": few + 1 if few else 0, "into": short}
        out, lse = attend(q, k, v, max_seqlen_q, block_table=block_table, **lengths, **beside, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, cache_seqlens: torch.Tensor | int | None = None,
    block_table: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    return_softmax_lse: bool = False, s_aux: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, k_min: torch.Tensor | None = None,
    v_min: torch.Tensor | None = None, k_tail: torch.Tensor | None = None, v_tail: torch.Tensor | None = None,
    quantized_seqlens: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of q [B, Sq, Hq, D] over a cache -> [B, Sq, Hq, Dv], or (out, log-sum-exp) with return_softmax_lse; k
    and v are first appended to the cache in place.

    k_cache [num_blocks, block_size, Hk, D], v_cache [num_blocks, block_size, Hk, Dv]: the pages; strided views are
    fine. k [B, Sn, Hk, D], v [B, Sn, Hk, Dv]: new keys and values, written at positions cache_seqlens[b] and following.
    cache_seqlens: int32 [B], or one int for all, tokens in the cache before the new ones; None for a full cache. A
    sequence of negative length is padding: nothing is written for it and it sees no key.
    block_table: int32 [B, max_blocks]; without it sequence b has the one page k_cache[b]. Pages named -1 are neither
    read nor written, and their keys are not seen. What does not fit into max_blocks * block_size is not stored.

    tree_mask: int64 [B, Sq], Sq <= 64: the last Sq keys are the nodes of a drafted token tree, and bit j of
    tree_mask[b, i] says that query i sees node j (its ancestors and itself); all earlier keys are seen. The position of
    a node counts its ancestors. `causal` and the right side of the window are ignored with it.

    Quantized pages (kv_formats.py has the layouts) are known by their dtype: int8 and float8_e4m3fn with k_scale,
    v_scale float16 [num_blocks, block_size, Hk]; new tokens are quantized into the pages. uint8, int4 or int2 by D:
    k_scale, k_min float16 [num_blocks, block_size / G, Hk, D], v_scale, v_min float16 [num_blocks, block_size, Hk, C],
    k_tail [B, R, Hk, D], v_tail [B, R, Hk, Dv], quantized_seqlens int32 [B]: sequence b has its first
    quantized_seqlens[b] tokens in the pages and the others, at most R, in the ring, where new ones are appended. With
    many queries the pages are dequantized to memory first, all that block_table has room for.

    rotary_cos, rotary_sin: [B or 1, Sq, D] in the dtype of q: q and the new keys, one for each query, are rotated by
    them first, x * cos + (-second half, first half) * sin, as transformers does it, in the launch that appends. Not for
    quantized pages.

    The launches depend on shapes only, so that a captured CUDA graph stays valid while lengths grow.
    """
    check_device(q)
    check_tensor("q", q, 4, q)
    check_cache(k_cache, v_cache, q.dtype, q)
    value_dim = getattr(v_tail, "shape", (None,))[-1]
    quantized = check_quantized(k_cache, v_cache, q.shape[-1], value_dim, k_scale, v_scale, k_min, v_min)
    quantized = check_tails(
        quantized, k_cache, v_cache, q.shape[0], q.dtype, k_tail, v_tail, quantized_seqlens, needed=True
    )
    if quantized is None or quantized.bits == 8:
        check_attention(q, k_cache, v_cache, ("k_cache", "v_cache"))
    else:
        check_heads(q, k_cache.shape[2], "k_cache")
        check_no_grad(q)
    if block_table is not None:
        check_integers("block_table", block_table, 2, q, length=q.shape[0])
    elif k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"k_cache has batch size {k_cache.shape[0]}, expected {q.shape[0]} as q without a block_table")
    elif quantized is not None:
        block_table = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)[:, None]
    options = check_options(
        q, q.shape[0], 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_softmax_lse
    )
    if tree_mask is not None:
        check_tree(tree_mask, q)
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, or neither")
    cache_seqlens = _lengths(q, k_cache, k, cache_seqlens, block_table, quantized)
    appended = 0
    if k is not None:
        tails = (k_tail, v_tail) if quantized is not None and quantized.bits < 8 else (k_cache, v_cache)
        check_new(q, k, v, *tails, 4)
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"k has batch size {k.shape[0]}, expected {q.shape[0]} as q")
        appended = k.shape[1]
        if tails[0] is k_tail and appended > k_tail.shape[1]:
            raise ValueError(f"k has {appended} new tokens: allowed are at most {k_tail.shape[1]}, the room of k_tail")
    _check_ranges(k_cache, cache_seqlens, appended, block_table, quantized)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together, or neither")
    if rotary_cos is not None:
        check_rotary(rotary_cos, rotary_sin, q, k)
        if quantized is not None:
            raise ValueError(f"rotary_cos with pages of {k_cache.dtype}: allowed are pages in the dtype of q")
        q = rotate_and_write(q, k, v, rotary_cos, rotary_sin, k_cache, v_cache, cache_seqlens, block_table)
    elif appended:
        _append(k, v, k_cache, v_cache, cache_seqlens, block_table, quantized)
    where = {"cache_seqlens": cache_seqlens, "appended": appended, "block_table": block_table}
    if tree_mask is not None or is_decode(q.shape[1], q.shape[2] // k_cache.shape[2]):
        out, lse = attend_few(q, k_cache, v_cache, tree_mask=tree_mask, quantized=quantized, **where, **options)
    else:
        if quantized is not None:
            k_cache, v_cache, where["block_table"] = gather_pages(
                k_cache, v_cache, block_table, q.dtype, quantized, cache_seqlens, appended
            )
        out, lse = attend(q, k_cache, v_cache, q.shape[1], **where, **options)
    return (out, lse) if return_softmax_lse else out


def check_new(q, k, v, k_cache, v_cache, dims: int) -> None:
    """Checks that new k and v [..., Hk, D or Dv] of q's dtype fit the cache or the rings they go to."""
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, tensor, dims, q)
        if tensor.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} has {tensor.shape[-2]} heads of dim {tensor.shape[-1]}, expected those of {name}_cache, "
                f"{cache.shape[-2]} of dim {cache.shape[-1]}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: all but the last must agree")
    check_no_grad(k, v)


def _capacity(k_cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Tokens that the pages of a sequence can hold."""
    return (1 if block_table is None else block_table.shape[1]) * k_cache.shape[1]


def _lengths(q, k_cache, k, cache_seqlens, block_table, quantized: QuantizedKV | None) -> torch.Tensor:
    """cache_seqlens as int32 [B]."""
    if cache_seqlens is None:
        if k is not None or (quantized is not None and quantized.k_tail is not None):
            raise ValueError("cache_seqlens is missing: without it the cache is full, with neither new keys nor tails")
        cache_seqlens = _capacity(k_cache, block_table)
    if type(cache_seqlens) is int:
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    check_integers("cache_seqlens", cache_seqlens, 1, q, length=q.shape[0])
    return cache_seqlens


def _check_ranges(k_cache, cache_seqlens, appended: int, block_table, quantized: QuantizedKV | None) -> None:
    """Checks page numbers and lengths, in debug mode."""
    check_numbers("block_table", block_table, k_cache.shape[0], "blocks of k_cache")
    capacity = _capacity(k_cache, block_table)
    if quantized is None or quantized.k_tail is None:
        check_lengths(cache_seqlens, appended, capacity)
    else:
        check_ring(quantized, cache_seqlens, appended, capacity, k_cache.shape[1])


def _append(k, v, k_cache, v_cache, cache_seqlens, block_table, quantized: QuantizedKV | None) -> None:
    """Writes k and v into the pages, as they are or in 8 bits, or into the rings."""
    if quantized is None:
        write(k, v, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table)
    elif quantized.k_tail is None:
        scales = {"k_scale": quantized.k_scale, "v_scale": quantized.v_scale}
        write(k, v, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table, **scales)
    else:
        write(k, v, quantized.k_tail, quantized.v_tail, cache_seqlens=cache_seqlens, ring=True)
