"""The public functions: they check their arguments, choose a kernel by shape and launch it. None waits for the GPU.

Common to all: dtypes float16, bfloat16 or float32 (the same for all tensors; float32 accumulation), head dims 1 to 256,
Hq a multiple of Hk (grouped-query attention), a contiguous last dimension and otherwise any strides.

softmax_scale: factor of the scores, by default D ** -0.5.
causal: query i stands at position i + Sk - Sq (bottom-right aligned) and sees no later key.
window_size: (left, right), a query sees the keys from position - left to position + right; -1 is no limit.
softcap: scores become softcap * tanh(scores / softcap); 0.0 is off.
s_aux: [Hq] logits of learned sinks, which join the denominator of the softmax only.
A query that sees no key gives 0.

Errors: TypeError and ValueError name the argument, what was given and what is allowed; RuntimeError for inputs that require
grad while grad is enabled (there is no backward pass).
"""

import operator

import torch

from .cache_write import write
from .checks import check_attention, check_device, check_integers, check_options, check_tensor
from .decode import attend_few, is_decode
from .forward import attend


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [B, Sq, Hq, D] over k [B, Sk, Hk, D] and v [B, Sk, Hk, Dv] -> [B, Sq, Hq, Dv].

    The result is always deterministic; `deterministic` is accepted because callers of flash-attn pass it. dropout_p must
    be 0.0. See https://arxiv.org/abs/2307.08691 and, for few queries,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    check_device(q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, 4, q)
    check_attention(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, expected {q.shape[0]} as q")
    options = check_options(q, dropout_p, softmax_scale, causal, window_size, softcap, s_aux)
    if is_decode(q.shape[1], q.shape[2] // k.shape[2]):
        return attend_few(q, k, v, **options)[0]
    return attend(q, k, v, q.shape[1], **options)[0]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of B packed sequences: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] -> [Tq, Hq, Dv].

    cu_seqlens_q, cu_seqlens_k: int32 [B + 1], sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].
    max_seqlen_q: the longest of the query lengths or more (a tensor works, but reading it waits for the GPU);
    max_seqlen_k is not needed.
    block_table: int32 [B, max_blocks]; then k and v are pages [num_blocks, block_size, Hk, D or Dv], cu_seqlens_k gives
    only the lengths, and keys in pages named -1 are not seen (their pages are never read).
    dropout_p must be 0.0; `deterministic` is accepted, the result always is.
    """
    check_device(q)
    pages = 3 if block_table is None else 4
    for name, tensor, dims in (("q", q, 3), ("k", k, pages), ("v", v, pages)):
        check_tensor(name, tensor, dims, q)
    check_attention(q, k, v)
    check_integers("cu_seqlens_q", cu_seqlens_q, 1, q)
    check_integers("cu_seqlens_k", cu_seqlens_k, 1, q, length=cu_seqlens_q.shape[0])
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q has shape (0,), expected one more element than there are sequences")
    if block_table is not None:
        check_integers("block_table", block_table, 2, q, length=cu_seqlens_q.shape[0] - 1)
    options = check_options(q, dropout_p, softmax_scale, causal, window_size, softcap, s_aux)
    return attend(
        q,
        k,
        v,
        operator.index(max_seqlen_q),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        **options,
    )[0]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [B, Sq, Hq, D] over a cache -> [B, Sq, Hq, Dv]; k and v are first appended to the cache in place.

    k_cache [num_blocks, block_size, Hk, D], v_cache [num_blocks, block_size, Hk, Dv]: the pages; strided views are fine.
    k [B, Sn, Hk, D], v [B, Sn, Hk, Dv]: new keys and values, written at positions cache_seqlens[b] and following.
    cache_seqlens: int32 [B], tokens in the cache before the new ones. A negative row is padding: nothing is written for
    it and its output is 0.
    block_table: int32 [B, max_blocks]; without it row b has the one page k_cache[b]. Pages named -1 are neither read nor
    written, and their keys are not seen. What does not fit into max_blocks * block_size is not stored.
    The launches depend on shapes only, so that a captured CUDA graph stays valid while lengths grow.
    """
    check_device(q)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor, 4, q)
    check_attention(q, k_cache, v_cache, ("k_cache", "v_cache"))
    check_integers("cache_seqlens", cache_seqlens, 1, q, length=q.shape[0])
    if block_table is not None:
        check_integers("block_table", block_table, 2, q, length=q.shape[0])
    elif k_cache.shape[0] != q.shape[0]:
        raise ValueError(
            f"k_cache has batch size {k_cache.shape[0]}, expected {q.shape[0]} as q without a block_table"
        )
    options = check_options(q, 0.0, softmax_scale, causal, window_size, softcap, s_aux)
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, or neither")
    appended = 0
    if k is not None:
        _check_new(q, k, v, k_cache, v_cache, 4)
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"k has batch size {k.shape[0]}, expected {q.shape[0]} as q")
        appended = k.shape[1]
        write(k, v, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table)
    where = {"cache_seqlens": cache_seqlens, "appended": appended, "block_table": block_table}
    if is_decode(q.shape[1], q.shape[2] // k_cache.shape[2]):
        return attend_few(q, k_cache, v_cache, **where, **options)[0]
    return attend(q, k_cache, v_cache, q.shape[1], **where, **options)[0]


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes k [T, Hk, D] and v [T, Hk, Dv] in place into pages k_cache [num_blocks, block_size, Hk, D] and v_cache.

    slot_mapping: int64 [T], token t goes to slot block * block_size + offset; a negative slot, or one beyond the cache,
    is skipped.
    """
    check_device(k)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor, 4, k)
    check_attention(k[:, :1], k_cache[:, :, :1], v_cache[:, :, :1], ("k_cache", "v_cache"))
    _check_new(k, k, v, k_cache, v_cache, 3)
    check_integers("slot_mapping", slot_mapping, 1, k, torch.int64, length=k.shape[0])
    write(k, v, k_cache, v_cache, slot_mapping=slot_mapping)


def _check_new(q, k, v, k_cache, v_cache, dims: int) -> None:
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, tensor, dims, q)
        if tensor.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} has {tensor.shape[-2]} heads of dim {tensor.shape[-1]}, expected those of {name}_cache, "
                f"{cache.shape[-2]} of dim {cache.shape[-1]}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: all but the last must agree")
