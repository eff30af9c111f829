"""Attention on CPU by torch operators: SDPA, or float32 products where softcap, sinks or log-sum-exp are asked for."""

import torch
import torch.nn.functional as F

from hf_efficient.kernels.attention import native_cpu, policy
from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.attention.flash_decoding import attend_pages
from hf_efficient.kernels.attention.masks import QueryBatch, additive
from hf_efficient.kernels.attention.pages import Pages, check_blocks, read_sequence, read_sequences, write_tokens


def attend(query, key, value, *, mask=None, causal=False, softmax_scale=None, softcap=0.0, s_aux=None):
    """Attention of query [B, Hq, S, D] over contiguous key [B, Hk, n, D], value [B, Hk, n, Dv], any strides: [B, S, Hq,
    Dv], zeros where a query sees nothing. mask: additive, [B or 1, 1 or Hq, S, n]. causal: needs S = n."""
    batch, heads, width, dim = query.shape
    group, needs_scores = heads // key.shape[1], bool(softcap) or s_aux is not None
    # numbers that each query adds: scores, or a mask that is repeated for the heads of a group
    numbers = batch * key.shape[2] * (heads if needs_scores else group)
    if width > 1 and width * numbers > policy.SCORES and (needs_scores or mask is not None):
        options = dict(causal=causal, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux)
        step, parts = max(1, policy.SCORES // numbers), []
        for start in range(0, width, step):
            seen = start + step if causal else None
            part_mask = None if mask is None else mask[:, :, start : start + step]
            part = query[:, :, start : start + step], key[:, :, :seen], value[:, :, :seen]
            parts.append(attend(*part, mask=part_mask, **options))
        return torch.cat(parts, 1)
    if needs_scores:
        return attend_with_scores(query, key, value, mask, causal, softmax_scale, softcap, s_aux)[0]
    if group == 1 or causal:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=softmax_scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    # The query heads of a group as more queries of one head: else torch reads every key once per query head.
    query = query.reshape(batch, key.shape[1], group * width, dim)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], key.shape[1], group * width, -1)
    elif mask is not None and width > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale)
    return out.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2)


def attend_with_scores(query, key, value, mask, causal, softmax_scale, softcap, s_aux):
    """As `attend`, by float32 scores, `causal` aligned to the bottom right. Returns the log-sum-exp [B, Hq, S] too."""
    batch, heads, width, dim = query.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    grouped = query.float().reshape(batch, key.shape[1], -1, width, dim)
    scores = torch.einsum("bhgsd,bhnd->bhgsn", grouped, key.float()) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(key.shape[2] - width)
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores + mask.reshape(mask.shape[0], *((1, 1) if mask.shape[1] == 1 else scores.shape[1:3]), width, -1)
    if s_aux is None:
        sinks = scores.new_full((), float("-inf"))
    else:
        sinks = s_aux.float().view(1, key.shape[1], -1, 1, 1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - highest)
    out = torch.einsum("bhgsn,bhnd->bhgsd", weights / total.clamp_min(1e-30), value.float())
    out = out.reshape(batch, heads, width, -1).transpose(1, 2).to(query.dtype)
    return out, (highest + total.log()).reshape(batch, heads, width)


def _attend_batch(call: AttentionCall, q, k, v, queries: QueryBatch, present=None):
    """Attention of q [B, S, Hq, D] over k [B, n, Hk, D], v [B, n, Hk, Dv], with the options of `call`.

    present: bool [n] or [B, n], False for keys that do not exist; None where all do. Returns [B, S, Hq, Dv] and the
    log-sum-exp float32 [B, Hq, S], empty unless asked for.
    """
    batch, width, heads, _ = q.shape
    length = k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    left, right = queries.left, queries.right
    options = dict(softmax_scale=call.softmax_scale, softcap=call.softcap, s_aux=call.s_aux)
    unmasked = queries.ancestors is None and queries.slopes is None and present is None and not call.return_lse
    unmasked = unmasked and length > 0 and (left < 0 or left >= length - 1)
    if unmasked and (right < 0 or right >= width - 1):
        return attend(q, k, v, **options).contiguous(), q.new_empty(0, dtype=torch.float32)
    if unmasked and right == 0 and width == length and not call.softcap and call.s_aux is None:
        return attend(q, k, v, causal=True, **options).contiguous(), q.new_empty(0, dtype=torch.float32)
    out = q.new_zeros(batch, width, heads, v.shape[-1])
    lse = torch.full((batch, heads, width), float("-inf"), dtype=torch.float32)
    if call.s_aux is not None:
        lse[:] = call.s_aux.float()[:, None]
    step = width if queries.ancestors is not None else max(1, policy.SCORES // (batch * heads * max(length, 1)))
    for start in range(0, width, step):
        stop = min(start + step, width)
        chunk = queries._replace(positions=queries.positions[:, start:stop])
        low = max(int(chunk.positions.min()) - left, 0) if left >= 0 else 0
        high = min(int(chunk.positions.max()) + right + 1, length) if right >= 0 else length
        if low >= high:
            continue
        keys = torch.arange(low, high).expand(batch, -1)
        seen = chunk.sees(keys)
        mask = additive(seen if present is None else seen & present[..., None, low:high])
        mask = mask if queries.slopes is None else mask + chunk.bias(keys)
        part = q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high]
        if call.return_lse:
            out[:, start:stop], lse[..., start:stop] = attend_with_scores(*part, mask, False, **options)
        else:
            out[:, start:stop] = attend(*part, mask=mask, **options)
    return out, lse if call.return_lse else lse.new_empty(0)


def flash_attn(call: AttentionCall):
    """`flash_attn_func`: keys and values are call.k_cache, call.v_cache [B, n, Hk, D]."""
    lengths = torch.full((call.q.shape[0],), call.k_cache.shape[1])
    queries = QueryBatch.aligned(lengths, call.q.shape[1], call.causal, call.left, call.right, slopes=call.alibi_slopes)
    return _attend_batch(call, call.q, call.k_cache, call.v_cache, queries)


def flash_attn_varlen(call: AttentionCall, cu_seqlens_q, cu_seqlens_k, max_q, max_k):
    """`flash_attn_varlen_func`: keys and values are call.k_cache, call.v_cache, pages with a call.block_table."""
    q, k, v, slopes = call.q, call.k_cache, call.v_cache, call.alibi_slopes
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full((q.shape[1], len(q) if call.return_lse else 0), float("-inf"), dtype=torch.float32)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b, (first, last) in enumerate(zip(starts_q, starts_q[1:])):
        if first == last:
            continue
        begin, end, present = starts_k[b], starts_k[b + 1], None
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        lengths = torch.tensor([end - begin])
        queries = QueryBatch.aligned(lengths, last - first, call.causal, call.left, call.right, slopes=own)
        if call.block_table is None:
            keys, values = k[begin:end], v[begin:end]
        else:
            (keys, present), (values, _) = (
                read_sequence(pages, call.block_table, b, end - begin, int(queries.first_seen))
                for pages in Pages.of_cache(k, v)
            )
        out[first:last], own_lse = _attend_batch(call, q[None, first:last], keys[None], values[None], queries, present)
        if call.return_lse:
            lse[:, first:last] = own_lse[0]
    return out, lse if call.return_lse else lse.new_empty(0)


def flash_attn_with_kvcache(call: AttentionCall):
    """`flash_attn_with_kvcache`: by the C++ kernels where they serve, else by what `policy.kvcache_reader` says."""
    q = call.q
    batch, width = q.shape[:2]
    has_table = call.block_table is not None
    if not has_table:
        call.block_table = torch.arange(batch)[:, None]
    if native_cpu.serves(q, call.k_cache, call.v_cache, call.k_scale, call.v_scale, call.k_min, call.v_min):
        result = native_cpu.attend(call)
        if result is not None:  # else an error that is raised below
            return result
    keys, values = Pages.of_cache(call.k_cache, call.v_cache, call.k_scale, call.v_scale, call.k_min, call.v_min)
    appended, rings = 0 if call.k is None else call.k.shape[1], (call.k_tail, call.v_tail)
    lengths = torch.where(call.cache_seqlens >= 0, call.cache_seqlens.long() + appended, 0)
    has_rings = call.k_tail is not None
    stored = torch.where(lengths > 0, call.quantized_seqlens.long(), 0) if has_rings else lengths
    _check_lengths(call, appended, lengths, stored)
    if appended:
        _append(call, keys, values)
    queries = QueryBatch.aligned(lengths, width, call.causal, call.left, call.right, call.tree_mask, call.alibi_slopes)
    longest = int(lengths.max()) if batch else 0
    key_numbers = batch * longest * call.k_cache.shape[2] * max(keys.dim, values.dim)
    reader = policy.kvcache_reader(width, key_numbers, has_table, has_rings, call.tree_mask is not None)
    if reader == "gather_batch":
        (gathered_keys, present), (gathered_values, _) = (
            read_sequences(pages, call.block_table, lengths, longest, queries.first_seen) for pages in (keys, values)
        )
        return _attend_batch(call, q, gathered_keys.to(q.dtype), gathered_values.to(q.dtype), queries, present)
    if reader == "flash_decoding":
        out, lse = attend_pages(call, keys, values, queries, (*rings, stored) if has_rings else None)
        return out, lse if call.return_lse else lse.new_empty(0)
    out = q.new_zeros(*q.shape[:3], values.dim)
    lse = torch.zeros(batch, q.shape[2], width if call.return_lse else 0, dtype=torch.float32)
    firsts = queries.first_seen.tolist()
    for b, (length, quantized, first) in enumerate(zip(lengths.tolist(), stored.tolist(), firsts)):
        if not has_table and call.k_scale is None:
            (own_keys, present), own_values = (call.k_cache[b, :length], None), call.v_cache[b, :length]
        else:
            (own_keys, present), (own_values, _) = (
                read_sequence(pages, call.block_table, b, length, first, ring, quantized)
                for pages, ring in zip((keys, values), rings)
            )
        one = own_keys[None].to(q.dtype), own_values[None].to(q.dtype), queries.select(torch.tensor([b]))
        out[b : b + 1], own_lse = _attend_batch(call, q[b : b + 1], *one, present)
        if call.return_lse:
            lse[b] = own_lse[0]
    return out, lse if call.return_lse else lse.new_empty(0)


def _check_lengths(call: AttentionCall, appended: int, lengths, stored) -> None:
    """Raises ValueError for sequences of more tokens than there is room for.

    lengths, stored: int64 [B], tokens of each sequence, and those of them in pages.
    """
    capacity, ring = call.block_table.shape[1] * call.k_cache.shape[1], call.k_tail
    if ring is not None:
        beyond, room, what = lengths - stored, ring.shape[1], "minus quantized_seqlens tokens: a ring has room for"
        wrong = (beyond > room) | (beyond < 0) | (stored > capacity)
    else:
        room, what, wrong = capacity, "tokens: block_table has room for", lengths > capacity
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise ValueError(
            f"cache_seqlens[{b}] = {int(call.cache_seqlens[b])} + {appended} new {what} {room}"
            + ("" if ring is None else f", and quantized_seqlens[{b}] = {int(stored[b])} must be in the pages")
        )


def _append(call: AttentionCall, keys: Pages, values: Pages) -> None:
    """Writes call.k, call.v behind the tokens that the sequences have, into the pages or the rings."""
    k, v, table, seqlens = call.k, call.v, call.block_table, call.cache_seqlens
    tokens, size = seqlens.long()[:, None] + torch.arange(k.shape[1]), keys.data.shape[1]
    if call.k_tail is None:
        blocks = table.gather(1, (tokens // size).clamp(0, table.shape[1] - 1)).long()
        check_blocks(blocks, keys)
    else:
        keys, values = Pages(call.k_tail, k.shape[-1]), Pages(call.v_tail, v.shape[-1])
        blocks, size = torch.arange(len(call.k_tail))[:, None], call.k_tail.shape[1]
    slots = torch.where((seqlens[:, None] >= 0) & (blocks >= 0), blocks * size + tokens % size, -1)
    write_tokens(k.flatten(0, 1), v.flatten(0, 1), keys, values, slots.flatten())
