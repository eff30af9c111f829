"""The attention ops of the torch.library namespace hf_efficient: schemas, fakes, and the implementation of each device.

The three attention ops return (out, log-sum-exp); the log-sum-exp has shape [0] where it was not asked for.
"""

import importlib

import torch

from hf_efficient.kernels.attention import pages, torch_cpu
from hf_efficient.kernels.attention.backward import attention_backward
from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.replay.cuda_graph import counts_in


_OPTIONS = (
    "float? softmax_scale, bool causal, int left, int right, float softcap, Tensor? alibi_slopes, Tensor? s_aux, "
    "bool return_lse"
)
SCHEMAS = {
    "flash_attn": f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    "flash_attn_varlen": "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, "
    f"SymInt max_k, Tensor? block_table, {_OPTIONS}) -> (Tensor, Tensor)",
    "flash_attn_with_kvcache": "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, "
    f"Tensor cache_seqlens, Tensor? block_table, {_OPTIONS}, Tensor? tree_mask, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor? k_min, Tensor? v_min, Tensor(e!)? k_tail, Tensor(f!)? v_tail, "
    "Tensor? quantized_seqlens) -> (Tensor, Tensor)",
    "flash_attn_backward": "(Tensor grad_out, Tensor? grad_lse, Tensor? out, Tensor? lse, Tensor q, Tensor k, "
    f"Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_q, SymInt max_k, {_OPTIONS}) -> (Tensor, "
    "Tensor, Tensor, Tensor)",
    "reshape_and_cache": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()",
    "quantize_and_cache": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scale, "
    "Tensor(d!) k_min, Tensor(e!) v_scale, Tensor(f!) v_min, Tensor group_mapping) -> ()",
    "copy_blocks": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor mapping, Tensor(c!)[] scales) -> ()",
    "gather_cache": "(Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_k, ScalarType dtype, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? k_min, Tensor? v_min, Tensor? k_tail, Tensor? v_tail, "
    "Tensor? quantized_seqlens, SymInt num_tokens) -> (Tensor, Tensor)",
}
_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")


def _triton():
    return importlib.import_module("hf_efficient.kernels.flash_paged")


def _no_lse(q):
    return q.new_empty(0, dtype=torch.float32)


def _flash_attn(implementation):
    """The op `flash_attn` by a function of an `AttentionCall`."""
    return lambda q, k, v, *options: implementation(AttentionCall.without_cache(q, k, v, None, *options))


def _flash_attn_varlen(implementation):
    """The op `flash_attn_varlen` by a function of an `AttentionCall`, cu_seqlens_q, cu_seqlens_k, max_q and max_k."""

    def op(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, block_table, *options):
        call = AttentionCall.without_cache(q, k, v, block_table, *options)
        return implementation(call, cu_seqlens_q, cu_seqlens_k, max_q, max_k)

    return op


def _flash_attn_with_kvcache(implementation):
    """The op `flash_attn_with_kvcache` by a function of an `AttentionCall`."""
    return lambda *args: implementation(AttentionCall(*args))


def _flash_attn_cuda(call: AttentionCall):
    result = _triton().flash_attn_func(
        call.q, call.k_cache, call.v_cache, return_attn_probs=call.return_lse, **call.scoring()
    )
    return result[:2] if call.return_lse else (result, _no_lse(call.q))


def _flash_attn_varlen_cuda(call: AttentionCall, *lengths):
    result = _triton().flash_attn_varlen_func(
        call.q, call.k_cache, call.v_cache, *lengths, block_table=call.block_table, return_attn_probs=call.return_lse,
        **call.scoring(),
    )  # fmt: skip
    return result[:2] if call.return_lse else (result, _no_lse(call.q))


def attend_with_kvcache_cuda(call: AttentionCall, **rotary):
    """The op `flash_attn_with_kvcache` by `flash_paged`. rotary: its rotary_cos and rotary_sin."""
    result = _triton().flash_attn_with_kvcache(
        call.q, call.k_cache, call.v_cache, call.k, call.v, cache_seqlens=call.cache_seqlens,
        block_table=call.block_table, return_softmax_lse=call.return_lse, tree_mask=call.tree_mask,
        **call.scoring(), **call.quantization(), **rotary,
    )  # fmt: skip
    return result if call.return_lse else (result, _no_lse(call.q))


def _copy_blocks_cuda(k_cache, v_cache, mapping, scales):
    _triton().copy_blocks(k_cache, v_cache, mapping, *scales)


def fake(call: AttentionCall, *lengths):
    """The result of an attention op without numbers: out [..., Hq, Dv] in the dtype of q, and the log-sum-exp float32
    [..., Hq, Sq], or an empty one. lengths: what only ops of packed sequences take."""
    q = call.q
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32) if call.return_lse else _no_lse(q)
    return q.new_empty(*q.shape[:-1], call.value_dim), lse


def _backward(grad_out, grad_lse, out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *options):
    call = AttentionCall.without_cache(q, k, v, None, *options)
    return attention_backward(grad_out, grad_lse, call, cu_seqlens_q, cu_seqlens_k)


def _backward_cuda(grad_out, grad_lse, out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *options):
    call = AttentionCall.without_cache(q, k, v, None, *options)
    *grads, grad_s_aux = _triton().flash_attn_backward(
        grad_out.contiguous(), q, k, v, out, lse, grad_lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **call.scoring()
    )
    return *grads, _no_lse(q) if grad_s_aux is None else grad_s_aux


def _backward_fake(grad_out, grad_lse, out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *options):
    s_aux = AttentionCall.without_cache(q, k, v, None, *options).s_aux
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return *grads, _no_lse(q) if s_aux is None else torch.empty_like(s_aux)


def _keep(ctx, call: AttentionCall, output, cu_seqlens_q=None, cu_seqlens_k=None, max_q=0, max_k=0):
    """The Triton backward reads the output and the log-sum-exp; the CPU's computes both again."""
    out, lse = output if needs_lse(call.q) else (None, None)
    ctx.save_for_backward(
        out, lse, call.q, call.k_cache, call.v_cache, cu_seqlens_q, cu_seqlens_k, call.alibi_slopes, call.s_aux
    )
    ctx.lengths, ctx.returned_lse = (max_q, max_k), call.return_lse
    ctx.numbers = call.softmax_scale, call.causal, call.left, call.right, call.softcap


def needs_lse(q: torch.Tensor) -> bool:
    """Whether a forward that wants gradients must return the log-sum-exp, because its backward reads it."""
    return q.is_cuda


def _keep_inputs(ctx, inputs, output):
    q, k, v, *options = inputs
    _keep(ctx, AttentionCall.without_cache(q, k, v, None, *options), output)


def _keep_varlen_inputs(ctx, inputs, output):
    q, k, v, *lengths, block_table = inputs[:8]
    _keep(ctx, AttentionCall.without_cache(q, k, v, block_table, *inputs[8:]), output, *lengths)


def _gradients(lengths: int):
    """The backward of an op that has so many arguments between v and softmax_scale."""

    def backward(ctx, grad_out, grad_lse):
        *tensors, slopes, s_aux = ctx.saved_tensors
        grad_lse = grad_lse if ctx.returned_lse else None
        *grads, grad_s_aux = OPS.flash_attn_backward(
            grad_out, grad_lse, *tensors, *ctx.lengths, *ctx.numbers, slopes, s_aux, ctx.returned_lse
        )
        without = (None,) * (lengths + len(ctx.numbers) + 1)
        return *grads, *without, None if s_aux is None else grad_s_aux, None

    return backward


def _gather_cache_fake(
    k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale, v_scale, k_min, v_min, k_tail, v_tail,
    quantized_seqlens, num_tokens,
):  # fmt: skip
    both = pages.Pages.of_cache(k_cache, v_cache, k_scale, v_scale, k_min)
    return tuple(each.data.new_empty(num_tokens, k_cache.shape[2], each.dim, dtype=dtype) for each in both)


def _writes_only(*args):
    return None


_IMPLEMENTATIONS = {  # op -> CPU, CUDA, fake
    "flash_attn": map(_flash_attn, (torch_cpu.flash_attn, _flash_attn_cuda, fake)),
    "flash_attn_varlen": map(_flash_attn_varlen, (torch_cpu.flash_attn_varlen, _flash_attn_varlen_cuda, fake)),
    "flash_attn_with_kvcache": map(
        _flash_attn_with_kvcache, (torch_cpu.flash_attn_with_kvcache, attend_with_kvcache_cuda, fake)
    ),
    "flash_attn_backward": (_backward, _backward_cuda, _backward_fake),
    "reshape_and_cache": (
        pages.reshape_and_cache_cpu, lambda *args: _triton().reshape_and_cache(*args), _writes_only
    ),
    "quantize_and_cache": (
        pages.quantize_and_cache_cpu, lambda *args: _triton().quantize_and_cache(*args), _writes_only
    ),
    "copy_blocks": (pages.copy_blocks_cpu, _copy_blocks_cuda, _writes_only),
    "gather_cache": (pages.gather_cache_cpu, lambda *args: _triton().gather_cache(*args), _gather_cache_fake),
}  # fmt: skip
for _name, (_cpu, _cuda, _fake_of) in _IMPLEMENTATIONS.items():
    _LIBRARY.define(_name + SCHEMAS[_name], tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"hf_efficient::{_name}", _fake_of, lib=_LIBRARY)
OPS = torch.ops.hf_efficient
for _name, _kept, _lengths in (("flash_attn", _keep_inputs, 0), ("flash_attn_varlen", _keep_varlen_inputs, 5)):
    _name = f"hf_efficient::{_name}"
    torch.library.register_autograd(_name, _gradients(_lengths), setup_context=_kept, lib=_LIBRARY)
counts_in(lambda buffer: _triton().counters_in(buffer))
