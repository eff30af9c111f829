"""Attention on CPU by torch operations: SDPA where it can, plain float32 operations for softcap and sinks."""

import torch
import torch.nn.functional as F


def visibility(positions, lengths, width: int, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """bool [B, S, width]: whether the query at `positions` [B, S] of its row sees key j. Nothing sees keys at or beyond
    `lengths` [B], and a negative window bound is no bound."""
    keys = torch.arange(width, device=positions.device)
    queries = positions[..., None]
    seen = (keys < lengths[:, None, None]).expand(*positions.shape, width)
    left, right = window_size
    if causal or right >= 0:
        seen = seen & (keys <= queries + (0 if causal else right))
    if left >= 0:
        seen = seen & (keys >= queries - left)
    return seen


def additive(seen: torch.Tensor) -> torch.Tensor:
    """Mask [B, 1, S, n] of zeros and -inf from bool [B, S, n]; float32, the only dtype SDPA need not convert."""
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))[:, None]


def attend(query, key, value, *, mask=None, causal=False, softmax_scale=None, softcap=0.0, s_aux=None):
    """Attention of `query` [B, Hq, S, D] over `key` [B, Hk, n, D], `value` [B, Hk, n, Dv], any strides: with an additive
    `mask` [B or 1, 1, S, n], or `causal` where S = n. Returns [B, S, Hq, Dv]; zeros where nothing is visible."""
    if softcap or s_aux is not None:
        return _attend_plain(query, key, value, mask, causal, softmax_scale, softcap, s_aux)
    batch, heads, width, dim = query.shape
    group = heads // key.shape[1]
    if group == 1 or causal:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=softmax_scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    # The queries of a group as one block of rows: torch would read every key once per query head.
    query = query.reshape(batch, key.shape[1], group * width, dim)
    if mask is not None and width > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale)
    return out.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2)


def _attend_plain(query, key, value, mask, causal, softmax_scale, softcap, s_aux):
    batch, heads, width, dim = query.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    grouped = query.float().reshape(batch, key.shape[1], -1, width, dim)
    scores = torch.einsum("bhgsd,bhnd->bhgsn", grouped, key.float()) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
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


def _attend_rows(query, key, value, causal, window_size, softmax_scale, softcap, s_aux):
    """[B, Sq, Hq, D] over [B, Sk, Hk, D], causal aligned to the bottom right."""
    batch, width = query.shape[:2]
    length = key.shape[1]
    left, right = window_size
    unbounded = (left < 0 or left >= length - 1) and (causal or right < 0 or right >= length - 1)
    options = dict(softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if length == 0:
        return query.new_zeros(batch, width, query.shape[1], value.shape[-1])
    if unbounded and (not causal or width == 1 or width == length):
        return attend(query, key, value, causal=causal and width > 1, **options).contiguous()
    positions = torch.arange(length - width, length, device=query.device)[None]
    seen = visibility(positions, torch.tensor([length], device=query.device), length, causal, window_size)
    return attend(query, key, value, mask=additive(seen), **options).contiguous()


def flash_attn_cpu(q, k, v, softmax_scale, causal, left, right, softcap, s_aux):
    return _attend_rows(q, k, v, causal, (left, right), softmax_scale, softcap, s_aux)


def flash_attn_varlen_cpu(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, left, right, softcap, s_aux, block_table
):
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row, (first, last) in enumerate(zip(starts_q, starts_q[1:])):
        if first == last:
            continue
        begin, end = starts_k[row], starts_k[row + 1]
        if block_table is None:
            keys, values = k[begin:end], v[begin:end]
        else:
            blocks = block_table[row, : -(-(end - begin) // k.shape[1])]
            keys, values = (pages[blocks].flatten(0, 1)[: end - begin] for pages in (k, v))
        out[first:last] = _attend_rows(
            q[None, first:last], keys[None], values[None], causal, (left, right), softmax_scale, softcap, s_aux
        )[0]
    return out


def flash_attn_with_kvcache_cpu(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, left, right, softcap, s_aux
):
    size, width = k_cache.shape[1], q.shape[1]
    lengths = cache_seqlens.long()
    present = lengths >= 0
    if k is not None:
        tokens = lengths[:, None] + torch.arange(k.shape[1])
        blocks = block_table.gather(1, (tokens // size).clamp(0, block_table.shape[1] - 1)).long()
        slots = torch.where(present[:, None] & (blocks >= 0), blocks * size + tokens % size, -1)
        reshape_and_cache_cpu(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots.flatten())
        lengths = torch.where(present, lengths + k.shape[1], lengths)
    longest = max(int(lengths.max()), 1)
    table = block_table[:, : -(-longest // size)].clamp_min(0).long()
    keys, values = (pages[table].flatten(1, 2)[:, :longest].transpose(1, 2) for pages in (k_cache, v_cache))
    positions = torch.arange(width) + lengths[:, None] - width
    mask = additive(visibility(positions, lengths, longest, causal, (left, right)))
    query = q.transpose(1, 2)
    out = attend(query, keys, values, mask=mask, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux)
    return out.contiguous()


def reshape_and_cache_cpu(k, v, k_cache, v_cache, slot_mapping):
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    size = k_cache.shape[1]
    k_cache[slots // size, slots % size] = k[kept]
    v_cache[slots // size, slots % size] = v[kept]
