"""Gradients of attention without a cache: every part of the scores is computed again in torch, as in
FlashAttention (https://arxiv.org/abs/2205.14135, algorithm 4). No matrix [Sq, Sk] outlives its part.

Attention without windows, softcap, sinks, ALiBi and a gradient of the log-sum-exp uses `products` (causal, bfloat16) or
the backward of SDPA. Everything else computes float32 scores, some queries at a time.
"""

import torch
import torch.nn.functional as F

from hf_efficient.kernels.attention import policy, products
from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.attention.masks import QueryBatch, additive
from hf_efficient.kernels.attention.torch_cpu import attend_with_scores


def attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    call: AttentionCall,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, keys, values and sinks, in their shapes and dtypes; float32 [0] where `call` has no sinks.

    Args:
        grad_out: of the output, in its shape.
        grad_lse: of the log-sum-exp, in its shape, or None.
        call: the arguments of `flash_attn`, or with cu_seqlens of `flash_attn_varlen`. Pages have no gradients.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where packed sequences begin, or None.
    """
    q, k, v = call.q, call.k_cache, call.v_cache
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    sinks = call.s_aux
    grad_sinks = q.new_zeros(0, dtype=torch.float32) if sinks is None else torch.zeros_like(sinks)
    for b, (queries, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k)):
        if q[queries].numel() and k[keys].numel():
            slopes = call.alibi_slopes
            slopes = slopes if slopes is None or slopes.dim() == 1 or queries == slice(None) else slopes[b]
            lse = None if grad_lse is None else grad_lse[(..., queries) if grad_lse.dim() == 2 else queries]
            one = _batched(q[queries], k[keys], v[keys], grad_out[queries])
            lse = lse if lse is None or lse.dim() == 3 else lse[None]
            parts = _attention_gradients(call, *one, lse, slopes)
            for grad, at, part in zip(grads, (queries, keys, keys), parts):
                grad[at] = part.view(grad[at].shape)
            if sinks is not None:
                grad_sinks += parts[3]
    return *grads, grad_sinks


def _sequences(cu_seqlens_q, cu_seqlens_k):
    """The slices of each packed sequence's queries and keys; all at once where nothing is packed."""
    if cu_seqlens_q is None:
        return [(slice(None), slice(None))]
    of_queries, of_keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return zip(map(slice, of_queries, of_queries[1:]), map(slice, of_keys, of_keys[1:]))


def _batched(*tensors):
    """Each as [B, S, H, D]; a packed sequence is a batch of one."""
    return [x if x.dim() == 4 else x[None] for x in tensors]


def _attention_gradients(call, q, k, v, grad_out, grad_lse, slopes):
    """Of q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], and of the sinks or None."""
    width, length = q.shape[1], k.shape[1]
    right = 0 if call.causal else call.right
    is_square = not call.causal or width == length
    sees_all = (call.left < 0 or call.left >= length - 1) and (call.causal or right < 0 or right >= width - 1)
    has_scores = call.softcap or call.s_aux is not None or slopes is not None or grad_lse is not None
    if is_square and sees_all and not has_scores:
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        if products.serves(*turned, is_causal=call.causal):
            found = products.gradients(*turned, grad_out.transpose(1, 2), call.softmax_scale)
            return *(x.transpose(1, 2) for x in found), None
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in turned]
            options = dict(is_causal=call.causal, scale=call.softmax_scale, enable_gqa=q.shape[2] != k.shape[2])
            out = F.scaled_dot_product_attention(*leaves, **options)
            return *(x.transpose(1, 2) for x in torch.autograd.grad(out, leaves, grad_out.transpose(1, 2))), None
    return _by_scores(call, q, k, v, grad_out, grad_lse, slopes)


def _by_scores(call, q, k, v, grad_out, grad_lse, slopes):
    """As `_attention_gradients`, by the scores of so many queries at once as `policy.SCORES` allows."""
    batch, width, heads, _ = q.shape
    length = k.shape[1]
    lengths = torch.full((batch,), length, device=q.device)
    queries = QueryBatch.aligned(lengths, width, call.causal, call.left, call.right, slopes=slopes)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    sinks = None if call.s_aux is None else call.s_aux.detach().requires_grad_()
    grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
    step = max(1, policy.SCORES // (batch * heads * length))
    for start in range(0, width, step):
        stop = min(start + step, width)
        chunk, first = queries._replace(positions=queries.positions[:, start:stop]), length - width
        low = max(first + start - queries.left, 0) if queries.left >= 0 else 0
        high = min(first + stop + queries.right, length) if queries.right >= 0 else length
        if low >= high:
            continue
        keys = torch.arange(low, high, device=q.device).expand(batch, -1)
        mask = additive(chunk.sees(keys))
        mask = mask if slopes is None else mask + chunk.bias(keys)
        at = (slice(start, stop), slice(low, high), slice(low, high))
        with torch.enable_grad():
            leaves = [x[:, part].detach().transpose(1, 2).requires_grad_() for x, part in zip((q, k, v), at)]
            options = dict(softmax_scale=call.softmax_scale, softcap=call.softcap, s_aux=sinks)
            outputs = attend_with_scores(*leaves, mask=mask, causal=False, **options)
            given = [grad_out[:, start:stop], None if grad_lse is None else grad_lse[..., start:stop]]
            known = [index for index, grad in enumerate(given) if grad is not None]
            found = torch.autograd.grad(
                [outputs[i] for i in known], leaves + ([] if sinks is None else [sinks]), [given[i] for i in known]
            )
        for grad, part, own in zip(grads, at, found):
            grad[:, part] += own.transpose(1, 2)
        if sinks is not None:
            grad_sinks += found[3]
    return *grads, grad_sinks
