"""Attention over contiguous keys and over paged caches: Triton kernels for CUDA tensors, C++ or torch for CPU tensors.

Each function is a `torch.library` op of the namespace hf_efficient, so that torch.compile and CUDA graphs see through
it. Over pages they have no backward. Without, it is `backward` on a CPU and `flash_paged.flash_attn_backward` on a GPU.
Layouts are FlashAttention's: tokens before heads. `flash_paged.kv_formats` describes quantized caches.
"""

import torch

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.attention import ops


# values of attn_implementation that mean this attention
ATTENTION_NAMES = ("flash_paged", "hf-efficient/flash_paged_2")

_OPS = ops.OPS


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0) -> None:
    """Raises the errors of the attention functions for inputs that none of them takes."""
    _check_queries(q, dropout_p)
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads are not a multiple of {k.shape[-2]} key heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values of different dtypes: {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"values of shape {tuple(v.shape)} for keys of shape {tuple(k.shape)}: only D may differ")


def _check_rows(q: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}: must have {q.shape[0]} rows, as q has")


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _check_pages(*tensors: torch.Tensor | None) -> None:
    """Raises RuntimeError where one of the inputs of attention over pages wants a gradient."""
    if _wants_gradients(*tensors):
        raise RuntimeError(
            "flash_paged attention over pages has no backward: run it under torch.no_grad() (model.generate does), or "
            "train without a cache (use_cache=False)"
        )


def _check_queries(q, dropout_p):
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(
            f'flash_paged attention runs on "cuda" and "cpu", not on {q.device.type!r}: use attn_implementation="sdpa"'
        )
    if q.is_cuda and not torch.compiler.is_compiling() and (reason := triton_devices.why_not(q.device)) is not None:
        raise RuntimeError(f'{reason}: use attn_implementation="sdpa"')
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: flash_paged attention has no dropout, only 0.0 is possible")


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, s_aux=None,
):  # fmt: skip
    """`flash_paged.flash_attn_func` on CPU, too: q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv] -> [B, Sq, Hq,
    Dv], or with return_attn_probs (out, log-sum-exp float32 [B, Hq, Sq], None).

    q, k, v, s_aux and the log-sum-exp have gradients.

    Raises RuntimeError where the device is neither CPU nor CUDA, ValueError for dropout and for heads, dtypes, batches
    or numbers of tokens that do not fit each other.
    """
    check_inputs(q, k, v, dropout_p)
    _check_rows(q, k=k)
    return_lse = return_attn_probs or (ops.needs_lse(q) and _wants_gradients(q, k, v, s_aux))
    out, lse = _OPS.flash_attn(
        q, k, v, softmax_scale, causal, *window_size, float(softcap or 0.0), alibi_slopes, s_aux, return_lse
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None, s_aux=None,
):  # fmt: skip
    """`flash_paged.flash_attn_varlen_func` on CPU, too: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], sequences laid
    end to end (or pages, with a block_table) -> [Tq, Hq, Dv]; the log-sum-exp is [Hq, Tq].

    Raises as `flash_attn_func`, RuntimeError where pages want gradients; on CPU also ValueError for lengths or blocks
    beyond the table or the pages.
    """
    check_inputs(q, k, v, dropout_p)
    if block_table is not None:
        _check_pages(q, k, v, s_aux)
    return_lse = return_attn_probs or (ops.needs_lse(q) and _wants_gradients(q, k, v, s_aux))
    out, lse = _OPS.flash_attn_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), block_table, softmax_scale, causal,
        *window_size, float(softcap or 0.0), alibi_slopes, s_aux, return_lse,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax_lse=False, s_aux=None, tree_mask=None,
    k_scale=None, v_scale=None, k_min=None, v_min=None, k_tail=None, v_tail=None, quantized_seqlens=None,
):  # fmt: skip
    """`flash_paged.flash_attn_with_kvcache` on CPU, too: appends k, v [B, Sn, Hk, D] to a paged cache in place, and
    attends with q [B, Sq, Hq, D] over all of it -> [B, Sq, Hq, Dv], or with return_softmax_lse (out, log-sum-exp [B,
    Hq, Sq]).

    On a CPU alibi_slopes may be [1, Hq, n]: what distances from 0 to n - 1, and all beyond, add to the scores.

    Raises as `flash_attn_varlen_func`.
    """
    quantized = k_cache.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)
    _check_pages(q, k, v, s_aux)
    if quantized:
        _check_queries(q, 0.0)
    else:
        check_inputs(q, k_cache if k is None else k, v_cache if v is None else v)
    if tree_mask is not None and (q.shape[1] > 64 or tree_mask.shape != q.shape[:2]):
        raise ValueError(
            f"tree_mask of shape {tuple(tree_mask.shape)} for {q.shape[1]} queries: allowed is [B, Sq <= 64]"
        )
    if quantized and (k_scale is None or v_scale is None):
        raise ValueError(f"a cache of {k_cache.dtype} needs k_scale and v_scale")
    if k_cache.dtype == torch.uint8 and any(x is None for x in (k_min, v_min, k_tail, v_tail, quantized_seqlens)):
        raise ValueError("int4 and int2 caches need k_min, v_min, k_tail, v_tail and quantized_seqlens")
    if cache_seqlens is None:
        if k is not None or k_tail is not None:
            raise ValueError("flash_attn_with_kvcache needs cache_seqlens to append, and with tails")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    _check_rows(q, k=k, cache_seqlens=cache_seqlens, block_table=block_table)
    if block_table is None:
        _check_rows(q, k_cache=k_cache)
    out, lse = _OPS.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, *window_size,
        float(softcap or 0.0), alibi_slopes, s_aux, return_softmax_lse, tree_mask, k_scale, v_scale, k_min, v_min,
        k_tail, v_tail, quantized_seqlens,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    """Writes k [T, Hk, D], v [T, Hk, Dv] into pages, quantized where these are int8 or float8_e4m3fn.

    slot_mapping: int64 [T], block * block_size + offset, -1 to skip a token.
    """
    _OPS.reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def quantize_and_cache(k, v, k_cache, v_cache, k_scale, k_min, v_scale, v_min, group_mapping) -> None:
    """Writes groups of tokens k [n, G, Hk, D], v [n, G, Hk, Dv] into int4 or int2 pages.

    group_mapping: int64 [n], block * (block_size / G) + number in the block, -1 to skip a group.
    """
    _OPS.quantize_and_cache(k, v, k_cache, v_cache, k_scale, k_min, v_scale, v_min, group_mapping)


def copy_blocks(k_cache, v_cache, mapping, *scales) -> None:
    """Copies blocks in place in all these tensors.

    mapping: int64 [n, 2], source and destination. No block may be written twice, or be both read and written.
    """
    _OPS.copy_blocks(k_cache, v_cache, mapping, list(scales))


def gather_cache(
    k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale=None, v_scale=None, k_min=None, v_min=None, k_tail=None,
    v_tail=None, quantized_seqlens=None, num_tokens=None,
):  # fmt: skip
    """The tokens of all sequences end to end, dequantized to `dtype`: k [num_tokens, Hk, D], v [num_tokens, Hk, Dv].

    num_tokens: cu_seqlens_k[-1] or more; None reads it, which waits for the device.
    """
    num_tokens = int(cu_seqlens_k[-1]) if num_tokens is None else num_tokens
    return _OPS.gather_cache(
        k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale, v_scale, k_min, v_min, k_tail, v_tail,
        quantized_seqlens, num_tokens,
    )  # fmt: skip
