"""What the attention kernels must compute, in plain torch and float64, one sequence at a time. Slow on purpose.

Every function has the signature and the returns of the kernel function without `_reference`; out has the dtype of `q`.
"""

import torch

from .quantized_reference import dequantize_cache, gather_sequence, quantize_tokens


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None, visible: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One sequence: q [Sq, Hq, D], k [Sk, Hk, D], v [Sk, Hk, Dv], alibi_slopes [Hq], visible bool [Sk], tree_mask int64
    [Sq] -> out float64 [Sq, Hq, Dv] and log-sum-exp float32 [Hq, Sq].

    Query i stands at position i + Sk - Sq (bottom-right aligned) and sees key j when position - left <= j <= position +
    right; `causal` makes right 0 and -1 means no limit. With tree_mask the last Sq keys are nodes of a tree, whose
    positions count their ancestors. A query that sees no key gives 0.
    """
    queries, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window_size[0], 0 if causal else window_size[1]
    first = keys - queries
    key = torch.arange(keys, device=q.device)
    position = torch.arange(queries, device=q.device) + first
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if tree_mask is not None:
        right = -1
        ancestors = (tree_mask[:, None] >> torch.arange(queries, device=q.device)) & 1
        position = first + ancestors.sum(1) - 1
        node = (key - first).clamp(min=0)
        mask = (key < first) | ancestors[:, node].bool()
        key = torch.where(key < first, key, position[node])
    if left >= 0:
        mask = mask & (key >= position[:, None] - left)
    if right >= 0:
        mask = mask & (key <= position[:, None] + right)
    if visible is not None:
        mask = mask & visible
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (position[:, None] - key).abs()
    scores = scores.masked_fill(~mask, float("-inf"))
    if s_aux is None:
        s_aux = torch.full((q.shape[1],), float("-inf"), device=q.device)
    scores = torch.cat([scores, s_aux.double()[:, None, None].expand(-1, queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1].masked_fill(~mask, 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), torch.logsumexp(scores, dim=-1).float()


def _slopes(alibi_slopes, sequence):
    return alibi_slopes[sequence] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes


def flash_attn_func_reference(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, s_aux=None,
):  # fmt: skip
    """q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv] -> [B, Sq, Hq, Dv]."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for sequence in range(q.shape[0]):
        slopes = _slopes(alibi_slopes, sequence)
        out[sequence], lse[sequence] = attention_reference(
            q[sequence], k[sequence], v[sequence], softmax_scale, causal, window_size, softcap, slopes, s_aux
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func_reference(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None, s_aux=None,
):  # fmt: skip
    """q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], or pages k [num_blocks, block_size, Hk, D] with block_table
    [B, max_blocks] -> [Tq, Hq, Dv]."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for sequence in range(len(starts_q) - 1):
        queries, keys = slice(*starts_q[sequence : sequence + 2]), slice(*starts_k[sequence : sequence + 2])
        if block_table is None:
            row_k, row_v, visible = k[keys], v[keys], None
        else:
            row_k, visible = gather_sequence(k, block_table[sequence], keys.stop - keys.start)
            row_v, _ = gather_sequence(v, block_table[sequence], keys.stop - keys.start)
        slopes = _slopes(alibi_slopes, sequence)
        out[queries], lse[:, queries] = attention_reference(
            q[queries], row_k, row_v, softmax_scale, causal, window_size, softcap, slopes, s_aux, visible
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_backward_reference(
    grad_out, q, k, v, out, lse, grad_lse=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    s_aux=None,
):  # fmt: skip
    """By autograd through `attention_reference`. Returns the gradients of q, k, v and s_aux (or None)."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, s_aux) if x is not None]
    grads = [torch.zeros_like(x) for x in inputs]
    if cu_seqlens_q is None:
        slices = [(index, index, (index,)) for index in range(q.shape[0])]
    else:
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        pairs = zip(zip(starts, starts[1:]), zip(ends, ends[1:]))
        slices = [(slice(*queries), slice(*keys), (slice(None), slice(*queries))) for queries, keys in pairs]
    with torch.enable_grad():
        for sequence, (queries, keys, rows) in enumerate(slices):
            own, found = attention_reference(
                inputs[0][queries], inputs[1][keys], inputs[2][keys], softmax_scale, causal, window_size, softcap,
                _slopes(alibi_slopes, sequence), inputs[3] if s_aux is not None else None,
            )  # fmt: skip
            given = [grad_out[queries].double()]
            if grad_lse is not None:
                given.append(grad_lse[rows].masked_fill(found == float("-inf"), 0.0))
            parts = torch.autograd.grad([own, found][: len(given)], inputs, given, allow_unused=True)
            for grad, part in zip(grads, parts):
                grad += 0 if part is None else part
    return (
        *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v))),
        grads[3].to(s_aux.dtype) if s_aux is not None else None,
    )


def flash_attn_with_kvcache_reference(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax_lse=False, s_aux=None, tree_mask=None,
    k_scale=None, v_scale=None, k_min=None, v_min=None, k_tail=None, v_tail=None, quantized_seqlens=None,
    rotary_cos=None, rotary_sin=None,
):  # fmt: skip
    """q [B, Sq, Hq, D], k_cache [num_blocks, block_size, Hk, D], v_cache [..., Dv], k and v [B, Sn, Hk, D or Dv]
    appended in place, cache_seqlens [B], block_table [B, max_blocks] (None: sequence b is block b) -> [B, Sq, Hq,
    Dv]."""
    if rotary_cos is not None:
        q, k = (rotate_reference(x, rotary_cos.to(x.dtype), rotary_sin.to(x.dtype)) for x in (q, k))
    if block_table is None:
        block_table = torch.arange(q.shape[0], device=q.device)[:, None]
    capacity = block_table.shape[1] * k_cache.shape[1] + (0 if k_tail is None else k_tail.shape[1])
    if cache_seqlens is None:
        cache_seqlens = capacity
    lengths = [cache_seqlens] * q.shape[0] if isinstance(cache_seqlens, int) else cache_seqlens.tolist()
    quantized = [0] * q.shape[0] if quantized_seqlens is None else quantized_seqlens.tolist()
    appended = 0 if k is None else k.shape[1]
    for sequence, length in enumerate(lengths):
        for new in range(appended if length >= 0 else 0):
            if k_tail is not None:
                k_tail[sequence, (length + new) % k_tail.shape[1]] = k[sequence, new]
                v_tail[sequence, (length + new) % v_tail.shape[1]] = v[sequence, new]
            elif length + new < capacity:
                page, offset = divmod(length + new, k_cache.shape[1])
                if block_table[sequence, page] >= 0:
                    _write(k[sequence, new], k_cache, k_scale, block_table[sequence, page], offset)
                    _write(v[sequence, new], v_cache, v_scale, block_table[sequence, page], offset)
    pages = dequantize_cache(k_cache, v_cache, k_scale, v_scale, k_min, v_min)

    head_dim = v_cache.shape[-1] if v_tail is None else v_tail.shape[-1]
    out = q.new_zeros((*q.shape[:-1], head_dim))
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for sequence, length in enumerate(lengths):
        length = min(length + appended, capacity) if length >= 0 else 0
        tails = [None if tail is None else tail[sequence] for tail in (k_tail, v_tail)]
        (own_k, visible), (own_v, _) = (
            gather_sequence(cache, block_table[sequence], length, tail, quantized[sequence])
            for cache, tail in zip(pages, tails)
        )
        out[sequence], lse[sequence] = attention_reference(
            q[sequence],
            own_k,
            own_v,
            softmax_scale,
            causal,
            window_size,
            softcap,
            _slopes(alibi_slopes, sequence),
            s_aux,
            visible,
            None if tree_mask is None else tree_mask[sequence],
        )
    return (out, lse) if return_softmax_lse else out


def rotate_reference(x, cos, sin):
    """x [B, S, H, D] rotated by cos and sin [B or 1, S, D]: x * cos + (-second half, first half) * sin."""
    low, high = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-high, low), -1) * sin[:, :, None]


def _write(x, cache, scale, block, offset):
    if scale is None:
        cache[block, offset] = x
    else:
        cache[block, offset], scale[block, offset] = quantize_tokens(x, cache.dtype)
