"""The attention ops of the torch.library namespace hf_efficient: schemas, fakes, and who implements them on which device.

Attention ops return (out, log-sum-exp), the second of shape [0] where it was not asked for.
"""

import importlib

import torch

from hf_efficient.kernels.attention import pages as attention_cpu_formats
from hf_efficient.kernels.attention import torch_cpu


_OPTIONS = (
    "float? softmax_scale, bool causal, int left, int right, float softcap, Tensor? alibi_slopes, Tensor? s_aux, "
    "bool return_lse"
)
_FORMAT = "Tensor? k_min, Tensor? v_min, Tensor? k_tail, Tensor? v_tail, Tensor? quantized_seqlens"
_SCHEMAS = {
    "flash_attn": f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    "flash_attn_varlen": "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, "
    f"SymInt max_k, {_OPTIONS}, Tensor? block_table) -> (Tensor, Tensor)",
    "flash_attn_with_kvcache": "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, "
    f"Tensor cache_seqlens, Tensor? block_table, {_OPTIONS}, Tensor? tree_mask, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor? k_min, Tensor? v_min, Tensor(e!)? k_tail, Tensor(f!)? v_tail, "
    "Tensor? quantized_seqlens) -> (Tensor, Tensor)",
    "reshape_and_cache": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()",
    "quantize_and_cache": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scale, "
    "Tensor(d!) k_min, Tensor(e!) v_scale, Tensor(f!) v_min, Tensor group_mapping) -> ()",
    "copy_blocks": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor mapping, Tensor(c!)[] scales) -> ()",
    "gather_cache": "(Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_k, ScalarType dtype, "
    f"Tensor? k_scale, Tensor? v_scale, {_FORMAT}, SymInt num_tokens) -> (Tensor, Tensor)",
}
_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")


def _kernels():
    return importlib.import_module("hf_efficient.kernels.flash_paged")


def _flash_attn_cuda(q, k, v, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux, return_lse):
    result = _kernels().flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=(left, right), softcap=softcap,
        alibi_slopes=alibi_slopes, return_attn_probs=return_lse, s_aux=s_aux,
    )  # fmt: skip
    return result[:2] if return_lse else (result, _no_lse(q))


def _flash_attn_varlen_cuda(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux,
    return_lse, block_table,
):  # fmt: skip
    result = _kernels().flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale=softmax_scale, causal=causal,
        window_size=(left, right), softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_lse,
        block_table=block_table, s_aux=s_aux,
    )  # fmt: skip
    return result[:2] if return_lse else (result, _no_lse(q))


def _flash_attn_with_kvcache_cuda(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux,
    return_lse, tree_mask, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
):  # fmt: skip
    result = _kernels().flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table, softmax_scale=softmax_scale,
        causal=causal, window_size=(left, right), softcap=softcap, alibi_slopes=alibi_slopes,
        return_softmax_lse=return_lse, s_aux=s_aux, tree_mask=tree_mask, k_scale=k_scale, v_scale=v_scale, k_min=k_min,
        v_min=v_min, k_tail=k_tail, v_tail=v_tail, quantized_seqlens=quantized_seqlens,
    )  # fmt: skip
    return result if return_lse else (result, _no_lse(q))


def _reshape_and_cache_cuda(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    _kernels().reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _quantize_and_cache_cuda(*args):
    _kernels().quantize_and_cache(*args)


def _copy_blocks_cuda(k_cache, v_cache, mapping, scales):
    _kernels().copy_blocks(k_cache, v_cache, mapping, *scales)


def _gather_cache_cuda(
    k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
    num_tokens,
):  # fmt: skip
    return _kernels().gather_cache(
        k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale=k_scale, v_scale=v_scale, k_min=k_min, v_min=v_min,
        k_tail=k_tail, v_tail=v_tail, quantized_seqlens=quantized_seqlens, num_tokens=num_tokens,
    )  # fmt: skip


def _no_lse(q):
    return q.new_empty(0, dtype=torch.float32)


def _flash_attn_fake(q, k, v, *args):
    return _fake_results(q, v.shape[-1], args[-1])


def _varlen_fake(q, k, v, *args):
    return _fake_results(q, v.shape[-1], args[-2])


def _kvcache_fake(q, k_cache, v_cache, k, v, cache_seqlens, block_table, *args):
    return_lse, v_tail = args[7], args[14]
    return _fake_results(q, (v_cache if v_tail is None else v_tail).shape[-1], return_lse)


def _fake_results(q, value_dim, return_lse):
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32) if return_lse else _no_lse(q)
    return q.new_empty(*q.shape[:-1], value_dim), lse


def _gather_cache_fake(k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale, v_scale, k_min, *args):
    keys, values = attention_cpu_formats.Pages.of_cache(k_cache, v_cache, k_scale, v_scale, k_min)
    return tuple(pages.data.new_empty(args[-1], k_cache.shape[2], pages.dim, dtype=dtype) for pages in (keys, values))


def _nothing(*args):
    return None


_IMPLEMENTATIONS = {  # op -> CPU, CUDA, fake
    "flash_attn": (torch_cpu.flash_attn_cpu, _flash_attn_cuda, _flash_attn_fake),
    "flash_attn_varlen": (torch_cpu.flash_attn_varlen_cpu, _flash_attn_varlen_cuda, _varlen_fake),
    "flash_attn_with_kvcache": (torch_cpu.flash_attn_with_kvcache_cpu, _flash_attn_with_kvcache_cuda, _kvcache_fake),
    "reshape_and_cache": (attention_cpu_formats.reshape_and_cache_cpu, _reshape_and_cache_cuda, _nothing),
    "quantize_and_cache": (attention_cpu_formats.quantize_and_cache_cpu, _quantize_and_cache_cuda, _nothing),
    "copy_blocks": (attention_cpu_formats.copy_blocks_cpu, _copy_blocks_cuda, _nothing),
    "gather_cache": (attention_cpu_formats.gather_cache_cpu, _gather_cache_cuda, _gather_cache_fake),
}
for _name, (_cpu, _cuda, _fake) in _IMPLEMENTATIONS.items():
    _LIBRARY.define(_name + _SCHEMAS[_name], tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"hf_efficient::{_name}", _fake, lib=_LIBRARY)
OPS = torch.ops.hf_efficient
