"""Attention on CPU by torch operations: SDPA where it can, plain float32 operations for softcap, sinks and log-sum-exp."""

import torch
import torch.nn.functional as F

from hf_efficient.kernels.attention import native_cpu as compiled
from hf_efficient.kernels.attention.flash_decoding import attend_pages
from hf_efficient.kernels.attention.masks import QueryRows, additive, visibility
from hf_efficient.kernels.attention.pages import Pages, check_blocks, read_row, read_rows, write_tokens


__all__ = ["additive", "attend", "visibility"]  # what the cache uses

_FEW_QUERIES = 16  # read pages in place up to so many, else gather them for SDPA
_SMALL = 1 << 20  # numbers of keys, padded: with so few, gathering them all costs less than cutting them up
_SCORES = 1 << 24  # numbers of a score matrix that is held at a time


def attend(query, key, value, *, mask=None, causal=False, softmax_scale=None, softcap=0.0, s_aux=None):
    """Attention of `query` [B, Hq, S, D] over `key` [B, Hk, n, D], `value` [B, Hk, n, Dv], any strides: with an additive
    `mask` [B or 1, 1 or Hq, S, n], or `causal` where S = n. Returns [B, S, Hq, Dv]; zeros where nothing is visible."""
    batch, heads, width, dim = query.shape
    group, plain = heads // key.shape[1], bool(softcap) or s_aux is not None
    numbers = (
        batch * key.shape[2] * (heads if plain else group)
    )  # that a query costs: of scores, or of a mask that is repeated
    if width * numbers > _SCORES and (plain or mask is not None):
        options = dict(causal=causal, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux)
        step, parts = max(1, _SCORES // numbers), []
        for start in range(0, width, step):
            seen = start + step if causal else None
            rows = None if mask is None else mask[:, :, start : start + step]
            part = query[:, :, start : start + step], key[:, :, :seen], value[:, :, :seen]
            parts.append(attend(*part, mask=rows, **options))
        return torch.cat(parts, 1)
    if plain:
        return _attend_plain(query, key, value, mask, causal, softmax_scale, softcap, s_aux)[0]
    if group == 1 or causal:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=softmax_scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    # The queries of a group as one block of rows: torch would read every key once per query head.
    query = query.reshape(batch, key.shape[1], group * width, dim)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], key.shape[1], group * width, -1)
    elif mask is not None and width > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale)
    return out.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2)


def _attend_plain(query, key, value, mask, causal, softmax_scale, softcap, s_aux):
    """As `attend`, `causal` aligned to the bottom right; returns the log-sum-exp float32 [B, Hq, S] too."""
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


def _attend_rows(q, k, v, queries: QueryRows, softmax_scale, softcap, s_aux, return_lse, present=None):
    """q [B, S, Hq, D] over k [B, n, Hk, D], v [B, n, Hk, Dv] of which bool `present` [n] or [B, n] exist. Returns [B, S, Hq, Dv] and
    the log-sum-exp float32 [B, Hq, S], empty unless asked for."""
    batch, width, heads, _ = q.shape
    length = k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    left, right, options = queries.left, queries.right, dict(softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux)
    everything = queries.ancestors is None and queries.slopes is None and present is None and not return_lse
    everything = everything and length > 0 and (left < 0 or left >= length - 1)
    if everything and (right < 0 or right >= length - 1 or (right == 0 and width == 1)):
        return attend(q, k, v, **options).contiguous(), q.new_empty(0, dtype=torch.float32)
    if everything and right == 0 and width == length and not softcap and s_aux is None:
        return attend(q, k, v, causal=True, **options).contiguous(), q.new_empty(0, dtype=torch.float32)
    out = q.new_zeros(batch, width, heads, v.shape[-1])
    lse = torch.full((batch, heads, width), float("-inf"))
    if s_aux is not None:
        lse[:] = s_aux.float()[:, None]
    step = width if queries.ancestors is not None else max(1, _SCORES // (batch * heads * max(length, 1)))
    for start in range(0, width, step):
        stop = min(start + step, width)
        chunk = queries._replace(positions=queries.positions[:, start:stop])
        low = max(int(chunk.positions.min()) - left, 0) if left >= 0 else 0
        high = min(int(chunk.positions.max()) + right + 1, length) if right >= 0 else length
        if low >= high:
            continue
        numbers = torch.arange(low, high).expand(batch, -1)
        seen = chunk.sees(numbers)
        mask = additive(seen if present is None else seen & present[..., None, low:high])
        mask = mask if queries.slopes is None else mask + chunk.bias(numbers)
        part = q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high]
        if return_lse:
            out[:, start:stop], lse[..., start:stop] = _attend_plain(*part, mask, False, **options)
        else:
            out[:, start:stop] = attend(*part, mask=mask, **options)
    return out, lse if return_lse else lse.new_empty(0)


def flash_attn_cpu(q, k, v, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux, return_lse):
    lengths = torch.full((q.shape[0],), k.shape[1])
    queries = QueryRows.aligned(lengths, q.shape[1], causal, left, right, slopes=alibi_slopes)
    return _attend_rows(q, k, v, queries, softmax_scale, softcap, s_aux, return_lse)


def flash_attn_varlen_cpu(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux,
    return_lse, block_table,
):  # fmt: skip
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full((q.shape[1], len(q) if return_lse else 0), float("-inf"))
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    keys, values = Pages.of_cache(k, v)
    for row, (first, last) in enumerate(zip(starts_q, starts_q[1:])):
        if first == last:
            continue
        begin, end, present = starts_k[row], starts_k[row + 1], None
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[row]
        queries = QueryRows.aligned(torch.tensor([end - begin]), last - first, causal, left, right, slopes=slopes)
        if block_table is None:
            row_keys, row_values = k[begin:end], v[begin:end]
        else:
            (row_keys, present), (row_values, _) = (
                read_row(pages, block_table, row, end - begin, int(queries.first_seen)) for pages in (keys, values)
            )
        out[first:last], row_lse = _attend_rows(
            q[None, first:last], row_keys[None], row_values[None], queries, softmax_scale, softcap, s_aux, return_lse,
            present,
        )  # fmt: skip
        if return_lse:
            lse[:, first:last] = row_lse[0]
    return out, lse if return_lse else lse.new_empty(0)


def flash_attn_with_kvcache_cpu(
    q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux,
    return_lse, tree_mask, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
):  # fmt: skip
    batch, width = q.shape[:2]
    table = torch.arange(batch)[:, None] if block_table is None else block_table
    if compiled.serves(q, k_cache, v_cache, k_scale, v_scale, k_min, v_min):
        result = compiled.attend(
            q, k_cache, v_cache, k, v, cache_seqlens, table, softmax_scale, causal, left, right, softcap, alibi_slopes, s_aux,
            return_lse, tree_mask, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
        )  # fmt: skip
        if result is not None:  # else an error that is raised below
            return result
    keys, values = Pages.of_cache(k_cache, v_cache, k_scale, v_scale, k_min, v_min)
    appended = 0 if k is None else k.shape[1]
    lengths = torch.where(cache_seqlens >= 0, cache_seqlens.long() + appended, 0)
    stored = lengths if k_tail is None else torch.where(lengths > 0, quantized_seqlens.long(), 0)
    _check_lengths(cache_seqlens, appended, table.shape[1] * k_cache.shape[1], lengths, stored, k_tail)
    if appended:
        _append(k, v, keys, values, cache_seqlens, table, k_tail, v_tail)
    queries = QueryRows.aligned(lengths, width, causal, left, right, tree_mask, alibi_slopes)
    longest = int(lengths.max()) if batch else 0
    if block_table is not None and k_tail is None and tree_mask is None and width <= _FEW_QUERIES:
        if batch * longest * k_cache.shape[2] * max(keys.dim, values.dim) <= _SMALL:
            (row_keys, present), (row_values, _) = (
                read_rows(pages, table, lengths, longest, queries.first_seen) for pages in (keys, values)
            )
            return _attend_rows(
                q, row_keys.to(q.dtype), row_values.to(q.dtype), queries, softmax_scale, softcap, s_aux, return_lse, present
            )  # fmt: skip
    if block_table is not None and (width <= _FEW_QUERIES or tree_mask is not None):
        tails = None if k_tail is None else (k_tail, v_tail, stored)
        out, lse = attend_pages(q, keys, values, queries, table, softmax_scale, softcap, s_aux, tails)
        return out, lse if return_lse else lse.new_empty(0)
    out = q.new_zeros(*q.shape[:3], values.dim)
    lse = torch.zeros(batch, q.shape[2], width if return_lse else 0)
    firsts = queries.first_seen.tolist()
    for row, (length, quantized, first) in enumerate(zip(lengths.tolist(), stored.tolist(), firsts)):
        if block_table is None and k_scale is None:
            (row_keys, present), row_values = (k_cache[row, :length], None), v_cache[row, :length]
        else:
            (row_keys, present), (row_values, _) = (
                read_row(pages, table, row, length, first, tail, quantized)
                for pages, tail in ((keys, k_tail), (values, v_tail))
            )
        out[row : row + 1], row_lse = _attend_rows(
            q[row : row + 1], row_keys[None].to(q.dtype), row_values[None].to(q.dtype),
            queries.select(torch.tensor([row])), softmax_scale, softcap, s_aux, return_lse, present,
        )  # fmt: skip
        if return_lse:
            lse[row] = row_lse[0]
    return out, lse if return_lse else lse.new_empty(0)


def _check_lengths(cache_seqlens, appended: int, capacity: int, lengths, stored, k_tail) -> None:
    """Raises ValueError for rows that hold more than there is room for."""
    if k_tail is not None:
        beyond, room, what = lengths - stored, k_tail.shape[1], "minus quantized_seqlens tokens: a ring has room for"
        wrong = (beyond > room) | (beyond < 0) | (stored > capacity)
    else:
        room, what, wrong = capacity, "tokens: block_table has room for", lengths > capacity
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"cache_seqlens[{row}] = {int(cache_seqlens[row])} + {appended} new {what} {room}"
            + ("" if k_tail is None else f", and quantized_seqlens[{row}] = {int(stored[row])} must be in the pages")
        )


def _append(k, v, keys: Pages, values: Pages, cache_seqlens, table, k_tail, v_tail) -> None:
    """k [B, n, Hk, D], v [B, n, Hk, Dv] behind the tokens that the rows have, into the pages or the rings."""
    tokens, size = cache_seqlens.long()[:, None] + torch.arange(k.shape[1]), keys.data.shape[1]
    if k_tail is None:
        blocks = table.gather(1, (tokens // size).clamp(0, table.shape[1] - 1)).long()
        check_blocks(blocks, keys)
    else:
        keys, values, size = Pages(k_tail, k.shape[-1]), Pages(v_tail, v.shape[-1]), k_tail.shape[1]
        blocks = torch.arange(len(k_tail))[:, None]
    slots = torch.where((cache_seqlens[:, None] >= 0) & (blocks >= 0), blocks * size + tokens % size, -1)
    write_tokens(k.flatten(0, 1), v.flatten(0, 1), keys, values, slots.flatten())
