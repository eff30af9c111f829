"""Attention of few queries over pages on CPU: the FlashDecoding of https://crfm.stanford.edu/2023/10/12/flashdecoding.html
in torch operations.

The pages of all rows are cut into segments of equal length, and as many as fit the cache of the processor are taken at a
time: read (in place where their blocks follow one another, else gathered), attended to by the queries of their rows, and
combined at the end by their log-sum-exp. Rows of unequal length cost no padding but in their last segment.
"""

from typing import NamedTuple

import torch

from hf_efficient.kernels.attention.masks import QueryRows
from hf_efficient.kernels.attention.pages import Pages, check_blocks


# Chosen with benchmarks/cpu_attention.py:
_SEGMENT = 512  # tokens, or one page if that is longer
_CHUNK = 1 << 19  # numbers of keys taken at a time


class Segments(NamedTuple):
    """Stretches of tokens, whole ones first: every query of the row sees all of these.

    rows: int64 [n]. keys: int64 [n], the first of each. blocks: int64 [n, pages], 0 where there is none. present: bool
    [n, pages], where there is one. whole: how many are whole.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    blocks: torch.Tensor
    present: torch.Tensor
    whole: int


def cut(queries: QueryRows, stored: torch.Tensor, block_table: torch.Tensor, pages: Pages) -> Segments:
    """The segments that anyone sees of the first `stored` (int64 [B]) tokens of each row, in the order of their blocks."""
    size, width = pages.data.shape[1], queries.positions.shape[1]
    length = max(1, _SEGMENT // size) * size
    first = queries.first_seen // size * size
    count = (stored - first + length - 1).clamp_min(0) // length
    rows = torch.repeat_interleave(count)
    keys = first[rows] + (torch.arange(len(rows)) - (count.cumsum(0) - count)[rows]) * length
    places = keys[:, None] // size + torch.arange(length // size)
    blocks = block_table[rows[:, None], places.clamp_max(block_table.shape[1] - 1)].long()
    present = (places * size < stored[rows, None]) & (blocks >= 0)
    blocks = torch.where(present, blocks, 0)
    check_blocks(blocks, pages)
    end, lengths = keys + length, queries.lengths[rows]
    whole = present.all(1) & (end <= stored[rows])
    if queries.ancestors is not None or queries.right >= 0:
        whole &= end <= lengths - width + (0 if queries.ancestors is not None else 1 + queries.right)
    if queries.left >= 0:
        whole &= keys >= lengths - 1 - queries.left
    order = torch.argsort(torch.where(whole, blocks[:, 0], len(pages.data)), stable=True)
    return Segments(rows[order], keys[order], blocks[order], present[order], int(whole.sum()))


class _Reader:
    """Reads segments of keys or values [n, Hk, T, D], any strides: in their dtype, codes as float32. A result is valid until
    the next one."""

    def __init__(self, pages: Pages, segments: Segments, step: int):
        self.pages = pages
        numbers = segments.blocks.flatten()
        self.breaks = torch.nn.functional.pad((numbers.diff() != 1).cumsum(0), (1, 0)).tolist()
        self.numbers, self.per_segment = numbers, segments.blocks.shape[1]
        shape = (min(step, len(segments.rows)) * self.per_segment, *pages.data.shape[1:3], pages.dim)
        self.gathered = torch.empty(shape, dtype=pages.data.dtype) if pages.scale is None else None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Segments `start` to `stop`."""
        first, last = start * self.per_segment, stop * self.per_segment
        blocks = self.numbers[first:last]
        if self.pages.scale is not None:
            pages = self.pages.read(blocks)
        else:
            if self.breaks[first] == self.breaks[last - 1]:
                pages = self.pages.data.narrow(0, int(blocks[0]), last - first)
            else:
                pages = torch.index_select(self.pages.data, 0, blocks, out=self.gathered[: last - first])
        heads, dim = pages.shape[2:]
        return pages.reshape(stop - start, -1, heads, dim).transpose(1, 2)


class _Parts:
    """The attention of each row to some of its keys, to be combined. query: float32 [B, Hk, G * S, D]."""

    def __init__(self, query: torch.Tensor, queries: QueryRows, scale: float, softcap: float):
        self.query, self.queries, self.scale, self.softcap = query, queries, scale, softcap
        self.rows, self.lse, self.out = [], [], []

    def add_whole(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """rows int64 [n] with keys [n, Hk, T, D], values [n, Hk, T, D] that all their queries see; no softcap, no slopes."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.query[rows].to(keys.dtype), keys, values, scale=self.scale
        )
        self.rows.append(rows)
        self.lse.append(lse)
        self.out.append(out.float())

    def add(self, rows, keys, values, numbers: torch.Tensor, present: torch.Tensor) -> None:
        """The same with values [n, Hk, T, Dv], int64 numbers of the keys [n, T], and bool [n, T]: keys that exist."""
        queries, keys, values = self.queries.select(rows), keys.float(), values.float()
        scores = self.query[rows].matmul(keys.contiguous().transpose(2, 3)).mul_(self.scale)
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        split = scores.unflatten(2, (-1, queries.positions.shape[1]))  # [n, Hk, G, S, T]
        if queries.slopes is not None:
            split += queries.bias(numbers).view_as(split)
        seen = queries.sees(numbers) & present[:, None]
        split.masked_fill_(~seen[:, None, None], float("-inf"))
        highest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
        # Not even a NaN gets in from a slot that nobody sees. `bitwise_and` is vectorized, `masked_fill` is not.
        visible = seen.any(1).int().neg_()[:, None, :, None]
        values = values.view(torch.int32).bitwise_and(visible).view(torch.float32).contiguous()
        self.rows.append(rows)
        self.lse.append((highest + total.log()).squeeze(-1))
        self.out.append(scores.matmul(values).div_(total.clamp_min(1e-30)))

    def combine(self, value_dim: int, s_aux: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention float32 [B, Hk, G * S, Dv] and its log-sum-exp [B, Hk, G * S]."""
        batch, heads, height = self.query.shape[:3]
        top = torch.full((batch, heads, height), float("-inf"))
        if s_aux is not None:
            top = s_aux.float().view(heads, -1, 1).expand(-1, -1, self.queries.positions.shape[1])
            top = top.reshape(1, heads, height).repeat(batch, 1, 1)
        sinks = top.clone()
        rows, lse = torch.cat(self.rows), torch.cat(self.lse)
        top.scatter_reduce_(0, rows[:, None, None].expand_as(lse), lse, "amax")
        top.clamp_min_(torch.finfo(torch.float32).min)
        total, weight = (sinks - top).exp_(), (lse - top[rows]).exp_()
        total.index_add_(0, rows, weight)
        out = torch.zeros(batch, heads, height, value_dim)
        out.index_add_(0, rows, torch.cat(self.out).mul_(weight[..., None]))
        return out.div_(total.clamp_min(1e-30)[..., None]), top + total.log()


def attend_pages(
    q,
    keys: Pages,
    values: Pages,
    queries: QueryRows,
    block_table,
    softmax_scale=None,
    softcap=0.0,
    s_aux=None,
    tails=None,
):
    """Attention of q [B, S, Hq, D] over pages through block_table [B, max_blocks], and over the `tails`, if any: keys
    [B, R, Hk, D] and values [B, R, Hk, Dv] in rings, and int64 [B], the first token there. Returns [B, S, Hq, Dv] of q's
    dtype and the log-sum-exp float32 [B, Hq, S]."""
    batch, width, query_heads, dim = q.shape
    size, heads = keys.data.shape[1:3]
    query = q.transpose(1, 2).float().reshape(batch, heads, -1, dim)  # row g * S + i of a head's product
    parts = _Parts(query, queries, dim**-0.5 if softmax_scale is None else softmax_scale, softcap)
    stored = queries.lengths if tails is None else tails[2]
    segments = cut(queries, stored, block_table, keys)
    plain = softcap or queries.slopes is not None or dim != values.dim
    whole, count = 0 if plain else segments.whole, len(segments.rows)
    length = segments.blocks.shape[1] * size
    step = max(1, _CHUNK // (length * max(heads * dim, heads * values.dim, query_heads * width)))
    readers = [_Reader(pages, segments, step) for pages in (keys, values)]
    chunks = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    chunks += [(start, min(start + step, count)) for start in range(whole, count, step)]
    for start, stop in chunks:
        rows = segments.rows[start:stop]
        read = [reader.read(start, stop) for reader in readers]
        if stop <= whole:
            parts.add_whole(rows, *read)
        else:
            numbers = segments.keys[start:stop, None] + torch.arange(length)
            present = segments.present[start:stop].repeat_interleave(size, 1) & (numbers < stored[rows, None])
            parts.add(rows, *read, numbers, present)
    if tails is not None:
        slots = torch.arange(tails[0].shape[1])
        numbers = stored[:, None] + (slots - stored[:, None]) % len(slots)
        rings = (ring.float().transpose(1, 2) for ring in tails[:2])
        parts.add(torch.arange(batch), *rings, numbers, numbers < queries.lengths[:, None])
    if not parts.rows:  # no row has a key
        nothing = torch.zeros(batch, heads, 1, max(dim, values.dim))
        none = torch.zeros(batch, 1, dtype=torch.long)
        parts.add(torch.arange(batch), nothing[..., :dim], nothing[..., : values.dim], none, none.bool())
    out, lse = parts.combine(values.dim, s_aux)
    out = out.view(batch, query_heads, width, -1).transpose(1, 2)
    return out.to(q.dtype).contiguous(), lse.view(batch, query_heads, width)
