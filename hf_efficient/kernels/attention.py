"""Attention by device: CUDA tensors go to the Triton kernels of `flash_paged`, CPU tensors to torch."""

import torch
import torch.nn.functional as F


ATTENTION_NAMES = (
    "flash_paged",
    "hf-efficient/flash_paged_2",
)  # values of attn_implementation that mean this attention
MAX_DECODE_QUERIES = 16  # so many new columns or fewer: one kernel that appends and attends


def visibility(positions, lengths, width: int, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """bool [B, S, width]: whether the query at `positions` [B, S] of its row sees key j; negative positions see
    nothing, nothing sees keys at or beyond `lengths` [B]. A negative window bound is no bound."""
    keys = torch.arange(width, device=positions.device)
    queries = positions[..., None]
    seen = (keys < lengths[:, None, None]) & (queries >= 0)
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if right >= 0:
        seen = seen & (keys <= queries + right)
    if left >= 0:
        seen = seen & (keys >= queries - left)
    return seen


def attend_cpu(query, key, value, *, mask=None, causal=False, softmax_scale=None, softcap=0.0, s_aux=None):
    """Attention of `query` [B, Hq, S, D] over `key` [B, Hk, n, D], `value` [B, Hk, n, Dv] by torch: additive `mask`
    [B or 1, 1, S, n], or `causal` with S = n. Returns [B, S, Hq, Dv]."""
    batch, heads, width, dim = query.shape
    groups = heads // key.shape[1]
    if softcap or s_aux is not None:
        return _attend_plain(query, key, value, mask, causal, softmax_scale, softcap, s_aux)
    if causal:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=softmax_scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2)
    if groups == 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale).transpose(1, 2)
    # the queries of a group together: torch reads every key once per query head otherwise
    query = query.reshape(batch, key.shape[1], groups * width, dim)
    if mask is not None and width > 1:
        mask = mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale)
    return out.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2)


def _attend_plain(query, key, value, mask, causal, softmax_scale, softcap, s_aux):
    """The same in plain float32 operations, with softcap and with sinks `s_aux` [Hq]."""
    batch, heads, width, dim = query.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    grouped = query.float().view(batch, key.shape[1], -1, width, dim)
    scores = torch.einsum("bhgsd,bhnd->bhgsn", grouped, key.float()) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if mask is not None:
        scores = scores + mask[:, None]
    highest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    if s_aux is not None:
        sinks = s_aux.float().view(1, key.shape[1], -1, 1, 1)
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    total = total + torch.exp(sinks - highest) if s_aux is not None else total.clamp_min(1e-30)
    out = torch.einsum("bhgsn,bhnd->bhgsd", weights / total, value.float())
    return out.reshape(batch, heads, width, -1).transpose(1, 2).to(query.dtype)
