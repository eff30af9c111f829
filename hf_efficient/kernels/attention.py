"""Attention by device: CUDA tensors go to the Triton kernels of `flash_paged`, CPU tensors to torch.

Each function is a `torch.library` op of the namespace hf_efficient, so that torch.compile and CUDA graphs see through
it. None of them has a backward. Layouts, as in FlashAttention: tokens before heads.
"""

import importlib

import torch

from hf_efficient.kernels import attention_cpu


ATTENTION_NAMES = (
    "flash_paged",
    "hf-efficient/flash_paged_2",
)  # values of attn_implementation that mean this attention

_OPTIONS = "float? softmax_scale, bool causal, int left, int right, float softcap, Tensor? s_aux"
_SCHEMAS = {
    "flash_attn": f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor",
    "flash_attn_varlen": "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, "
    f"SymInt max_k, {_OPTIONS}, Tensor? block_table) -> Tensor",
    "flash_attn_with_kvcache": "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, "
    f"Tensor cache_seqlens, Tensor block_table, {_OPTIONS}) -> Tensor",
    "reshape_and_cache": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
}
_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")


def _kernels():
    return importlib.import_module("hf_efficient.kernels.flash_paged")


def _flash_attn_cuda(q, k, v, softmax_scale, causal, left, right, softcap, s_aux):
    return _kernels().flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=(left, right), softcap=softcap, s_aux=s_aux
    )


def _flash_attn_varlen_cuda(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, left, right, softcap, s_aux, block_table
):
    return _kernels().flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale=softmax_scale, causal=causal,
        window_size=(left, right), softcap=softcap, s_aux=s_aux, block_table=block_table,
    )  # fmt: skip


def _flash_attn_with_kvcache_cuda(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, left, right, softcap, s_aux
):
    return _kernels().flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table, softmax_scale=softmax_scale,
        causal=causal, window_size=(left, right), softcap=softcap, s_aux=s_aux,
    )  # fmt: skip


def _reshape_and_cache_cuda(k, v, k_cache, v_cache, slot_mapping):
    _kernels().reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)


def _like_queries(q, k, v, *args):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _nothing(*args):
    return None


_IMPLEMENTATIONS = {  # op -> CPU, CUDA, fake
    "flash_attn": (attention_cpu.flash_attn_cpu, _flash_attn_cuda, _like_queries),
    "flash_attn_varlen": (attention_cpu.flash_attn_varlen_cpu, _flash_attn_varlen_cuda, _like_queries),
    "flash_attn_with_kvcache": (
        attention_cpu.flash_attn_with_kvcache_cpu,
        _flash_attn_with_kvcache_cuda,
        _like_queries,
    ),
    "reshape_and_cache": (attention_cpu.reshape_and_cache_cpu, _reshape_and_cache_cuda, _nothing),
}
for _name, (_cpu, _cuda, _fake) in _IMPLEMENTATIONS.items():
    _LIBRARY.define(_name + _SCHEMAS[_name], tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"hf_efficient::{_name}", _fake, lib=_LIBRARY)
_OPS = torch.ops.hf_efficient


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0) -> None:
    """Raises what the attention functions raise for what none of them can do."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "flash_paged attention has no backward: run it under torch.no_grad() (model.generate does), or train with "
            'attn_implementation="sdpa"'
        )
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(
            f'flash_paged attention runs on "cuda" and "cpu", not on {q.device.type!r}: use attn_implementation="sdpa"'
        )
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: flash_paged attention has no dropout, only 0.0 is possible")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads are not a multiple of {k.shape[-2]} key heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values of different dtypes: {q.dtype}, {k.dtype}, {v.dtype}")


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    s_aux=None,
):  # fmt: skip
    """Attention of q [B, Sq, Hq, D] over k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]. Returns [B, Sq, Hq, Dv].

    causal: aligned to the bottom right. window_size: keys seen to the left and right of a query, -1 for all; softcap:
    scores become softcap * tanh(score / softcap); s_aux [Hq]: sink logits that join the softmax's denominator.
    softmax_scale: D ** -0.5 by default. Always deterministic.

    Raises RuntimeError when a gradient is asked for or the device is neither CPU nor CUDA, ValueError for dropout.
    """
    check_inputs(q, k, v, dropout_p)
    return _OPS.flash_attn(q, k, v, softmax_scale, causal, *window_size, float(softcap or 0.0), s_aux)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, deterministic=False, s_aux=None, block_table=None,
):  # fmt: skip
    """The same for sequences laid end to end: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] with cumulative lengths int32
    [B + 1]. With a block_table int32 [B, max_blocks], k and v are pages [num_blocks, block_size, Hk, D] and
    cu_seqlens_k only gives the lengths. Returns [Tq, Hq, Dv]."""
    check_inputs(q, k, v, dropout_p)
    return _OPS.flash_attn_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), softmax_scale, causal, *window_size,
        float(softcap or 0.0), s_aux, block_table,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, s_aux=None,
):  # fmt: skip
    """Attention of q [B, Sq, Hq, D] over pages [num_blocks, block_size, Hk, D] through block_table int32 [B, max_blocks];
    row b holds cache_seqlens[b] (int32) tokens, and k, v [B, Sn, Hk, D] are appended in place first. Rows with a negative
    length are padding. Returns [B, Sq, Hq, Dv]."""
    if cache_seqlens is None or block_table is None:
        raise ValueError("flash_attn_with_kvcache needs cache_seqlens and block_table")
    check_inputs(q, k_cache if k is None else k, v_cache if v is None else v)
    return _OPS.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, *window_size,
        float(softcap or 0.0), s_aux,
    )  # fmt: skip


def reshape_and_cache(k, v, k_cache, v_cache, slot_mapping) -> None:
    """Writes k [T, Hk, D], v [T, Hk, Dv] into pages; slot_mapping int64 [T] = block * block_size + offset, -1 to skip."""
    _OPS.reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)
