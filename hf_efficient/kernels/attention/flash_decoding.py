"""Attention of few queries over pages on CPU by torch operators: FlashDecoding
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

The pages of all sequences are cut into segments of equal length. As many segments as fit into the processor's cache are
read at a time (in place where their blocks follow one another, else gathered) and attended to by the queries of their
sequences; the partial results are combined by their log-sum-exp. Sequences of unequal length cost padding only in their
last segment.
"""

from typing import NamedTuple

import torch

from hf_efficient.kernels.attention import policy
from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.attention.masks import QueryBatch
from hf_efficient.kernels.attention.pages import Pages, check_blocks


class Segments(NamedTuple):
    """Ranges of tokens. Those that every query of their sequence attends to as a whole come first.

    sequences: int64 [n], the index in the batch.
    keys: int64 [n], the index of the first key.
    blocks: int64 [n, pages], 0 for no block.
    present: bool [n, pages], whether there is a block.
    whole: how many of the segments need no mask.
    """

    sequences: torch.Tensor
    keys: torch.Tensor
    blocks: torch.Tensor
    present: torch.Tensor
    whole: int


def cut(queries: QueryBatch, stored: torch.Tensor, block_table: torch.Tensor, pages: Pages) -> Segments:
    """The segments that any query sees, in the order of their blocks. stored: int64 [B], tokens of each sequence in
    pages."""
    size, width = pages.data.shape[1], queries.positions.shape[1]
    length = max(1, policy.SEGMENT // size) * size
    first = queries.first_seen // size * size
    count = (stored - first + length - 1).clamp_min(0) // length
    sequences = torch.repeat_interleave(count)
    keys = first[sequences] + (torch.arange(len(sequences)) - (count.cumsum(0) - count)[sequences]) * length
    numbers = keys[:, None] // size + torch.arange(length // size)  # of the blocks in their sequence
    blocks = block_table[sequences[:, None], numbers.clamp_max(block_table.shape[1] - 1)].long()
    present = (numbers * size < stored[sequences, None]) & (blocks >= 0)
    blocks = torch.where(present, blocks, 0)
    check_blocks(blocks, pages)
    end, lengths = keys + length, queries.lengths[sequences]
    whole = present.all(1) & (end <= stored[sequences])
    if queries.ancestors is not None or queries.right >= 0:
        whole &= end <= lengths - width + (0 if queries.ancestors is not None else 1 + queries.right)
    if queries.left >= 0:
        whole &= keys >= lengths - 1 - queries.left
    order = torch.argsort(torch.where(whole, blocks[:, 0], len(pages.data)), stable=True)
    return Segments(sequences[order], keys[order], blocks[order], present[order], int(whole.sum()))


class _Reader:
    """Reads segments as keys or values [n, Hk, T, D], any strides: full-precision pages in their dtype, quantized ones
    in float32. The next `read` overwrites the result of the last."""

    def __init__(self, pages: Pages, segments: Segments, step: int):
        self.pages = pages
        self.blocks, self.per_segment = segments.blocks.flatten(), segments.blocks.shape[1]
        # two blocks with the same count lie in one run of consecutive blocks
        self.breaks = torch.nn.functional.pad((self.blocks.diff() != 1).cumsum(0), (1, 0)).tolist()
        shape = (min(step, len(segments.sequences)) * self.per_segment, *pages.data.shape[1:3], pages.dim)
        self.gathered = torch.empty(shape, dtype=pages.data.dtype) if pages.scale is None else None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Segments `start` to `stop`."""
        first, last = start * self.per_segment, stop * self.per_segment
        blocks = self.blocks[first:last]
        if self.pages.scale is not None:
            pages = self.pages.read(blocks)
        else:
            if self.breaks[first] == self.breaks[last - 1]:
                pages = self.pages.data.narrow(0, int(blocks[0]), last - first)
            else:
                pages = torch.index_select(self.pages.data, 0, blocks, out=self.gathered[: last - first])
        heads, dim = pages.shape[2:]
        return pages.reshape(stop - start, -1, heads, dim).transpose(1, 2)


class _PartialResults:
    """The attention of each sequence to some of its keys, until `combine`. query: float32 [B, Hk, G * S, D]."""

    def __init__(self, query: torch.Tensor, queries: QueryBatch, scale: float, softcap: float):
        self.query, self.queries, self.scale, self.softcap = query, queries, scale, softcap
        self.sequences, self.lse, self.out = [], [], []

    def add_whole(self, sequences: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds keys and values [n, Hk, T, D] that all queries of `sequences` (int64 [n]) see; no softcap, no slopes."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.query[sequences].to(keys.dtype), keys, values, scale=self.scale
        )
        self.sequences.append(sequences)
        self.lse.append(lse)
        self.out.append(out.float())

    def add(self, sequences, keys, values, key_indices: torch.Tensor, present: torch.Tensor) -> None:
        """Adds keys [n, Hk, T, D] and values [n, Hk, T, Dv]. key_indices: int64 [n, T], in their sequence; present:
        bool [n, T], keys that exist."""
        queries, keys, values = self.queries.select(sequences), keys.float(), values.float()
        scores = self.query[sequences].matmul(keys.contiguous().transpose(2, 3)).mul_(self.scale)
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        split = scores.unflatten(2, (-1, queries.positions.shape[1]))  # [n, Hk, G, S, T]
        if queries.slopes is not None:
            split += queries.bias(key_indices).view_as(split)
        seen = queries.sees(key_indices) & present[:, None]
        split.masked_fill_(~seen[:, None, None], float("-inf"))
        highest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
        total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
        # A slot that no query sees may hold a NaN, which 0 * NaN would let in. `bitwise_and` is vectorized,
        # `masked_fill` not.
        visible = seen.any(1).int().neg_()[:, None, :, None]
        values = values.view(torch.int32).bitwise_and(visible).view(torch.float32).contiguous()
        self.sequences.append(sequences)
        self.lse.append((highest + total.log()).squeeze(-1))
        self.out.append(scores.matmul(values).div_(total.clamp_min(1e-30)))

    def combine(self, value_dim: int, s_aux: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention float32 [B, Hk, G * S, Dv] and its log-sum-exp [B, Hk, G * S]."""
        batch, heads, height = self.query.shape[:3]
        top = torch.full((batch, heads, height), float("-inf"), dtype=torch.float32)
        if s_aux is not None:
            top = s_aux.float().view(heads, -1, 1).expand(-1, -1, self.queries.positions.shape[1])
            top = top.reshape(1, heads, height).repeat(batch, 1, 1)
        sinks = top.clone()
        sequences, lse = torch.cat(self.sequences), torch.cat(self.lse)
        top.scatter_reduce_(0, sequences[:, None, None].expand_as(lse), lse, "amax")
        top.clamp_min_(torch.finfo(torch.float32).min)
        total, weight = (sinks - top).exp_(), (lse - top[sequences]).exp_()
        total.index_add_(0, sequences, weight)
        out = torch.zeros(batch, heads, height, value_dim, dtype=torch.float32)
        out.index_add_(0, sequences, torch.cat(self.out).mul_(weight[..., None]))
        return out.div_(total.clamp_min(1e-30)[..., None]), top + total.log()


def attend_pages(call: AttentionCall, keys: Pages, values: Pages, queries: QueryBatch, rings=None):
    """Attention of call.q [B, S, Hq, D] over pages through call.block_table [B, max_blocks].

    rings: keys [B, R, Hk, D] and values [B, R, Hk, Dv] in rings, and int64 [B], the first token of each sequence there;
    None without. Returns [B, S, Hq, Dv] in q's dtype and the log-sum-exp float32 [B, Hq, S].
    """
    batch, width, query_heads, dim = call.q.shape
    size, heads = keys.data.shape[1:3]
    # query head g, query i of a key head: g * S + i
    query = call.q.transpose(1, 2).float().reshape(batch, heads, -1, dim)
    scale = dim**-0.5 if call.softmax_scale is None else call.softmax_scale
    parts = _PartialResults(query, queries, scale, call.softcap)
    stored = queries.lengths if rings is None else rings[2]
    segments = cut(queries, stored, call.block_table, keys)
    needs_scores = call.softcap or queries.slopes is not None or dim != values.dim
    whole, count = 0 if needs_scores else segments.whole, len(segments.sequences)
    length = segments.blocks.shape[1] * size
    step = max(1, policy.CHUNK // (length * max(heads * dim, heads * values.dim, query_heads * width)))
    readers = [_Reader(pages, segments, step) for pages in (keys, values)]
    chunks = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    chunks += [(start, min(start + step, count)) for start in range(whole, count, step)]
    for start, stop in chunks:
        sequences = segments.sequences[start:stop]
        read = [reader.read(start, stop) for reader in readers]
        if stop <= whole:
            parts.add_whole(sequences, *read)
        else:
            indices = segments.keys[start:stop, None] + torch.arange(length)
            present = segments.present[start:stop].repeat_interleave(size, 1) & (indices < stored[sequences, None])
            parts.add(sequences, *read, indices, present)
    if rings is not None:
        slots = torch.arange(rings[0].shape[1])
        indices = stored[:, None] + (slots - stored[:, None]) % len(slots)
        both = (ring.float().transpose(1, 2) for ring in rings[:2])
        parts.add(torch.arange(batch), *both, indices, indices < queries.lengths[:, None])
    if not parts.sequences:  # no sequence has a key
        nothing = torch.zeros(batch, heads, 1, max(dim, values.dim), dtype=torch.float32)
        none = torch.zeros(batch, 1, dtype=torch.long)
        parts.add(torch.arange(batch), nothing[..., :dim], nothing[..., : values.dim], none, none.bool())
    out, lse = parts.combine(values.dim, call.s_aux)
    out = out.view(batch, query_heads, width, -1).transpose(1, 2)
    return out.to(call.q.dtype).contiguous(), lse.view(batch, query_heads, width)
