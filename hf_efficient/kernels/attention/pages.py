"""Reads, writes, quantizes, copies and gathers pages on CPU, in full precision and in the quantized formats of
`flash_paged.kv_formats`. Codes and scales have the bits of `flash_paged.quantized_reference`."""

from typing import NamedTuple

import torch


_MAX_CODE = {torch.int8: 127, torch.float8_e4m3fn: 448}
_MAX_HALF = torch.finfo(torch.float16).max
_KEY_CLIP = {4: 0.0, 2: 0.125}  # as in `flash_paged.kv_formats`


class Pages(NamedTuple):
    """The keys or the values of a cache.

    data: [blocks, block_size, Hk, D], D packed in uint8 for 4 and 2 bits. dim: D, channels. scale, minimum: float16, of
    quantized pages, in the shapes that `flash_paged.kv_formats` gives.
    """

    data: torch.Tensor
    dim: int
    scale: torch.Tensor | None = None
    minimum: torch.Tensor | None = None

    @classmethod
    def of_cache(cls, k_cache, v_cache, k_scale=None, v_scale=None, k_min=None, v_min=None) -> tuple["Pages", "Pages"]:
        """Keys and values."""
        if k_min is None:
            return cls(k_cache, k_cache.shape[-1], k_scale), cls(v_cache, v_cache.shape[-1], v_scale)
        dim = k_scale.shape[-1]
        value_dim = v_cache.shape[-1] * (dim // k_cache.shape[-1])
        return cls(k_cache, dim, k_scale, k_min), cls(v_cache, value_dim, v_scale, v_min)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers [n, block_size, Hk, D] of `blocks` (int64 [n]), float32 where quantized."""
        if self.scale is None:
            return self.data.index_select(0, blocks)
        scale = self.scale.index_select(0, blocks).float()
        if self.minimum is None:
            if self.data.dtype == torch.int8:
                numbers = self.data.index_select(0, blocks).float()
            else:
                numbers = _widen(self.data.view(torch.uint8).index_select(0, blocks))
            return numbers.mul_(scale[..., None])
        minimum = self.minimum.index_select(0, blocks).float()
        codes = unpack(self.data.index_select(0, blocks), self.dim // self.data.shape[-1]).float()
        # keys: groups of tokens share a scale for each channel; values: groups of channels one for each token
        split = codes.unflatten(1, (scale.shape[1], -1)).unflatten(-1, (scale.shape[-1], -1))
        split.mul_(scale[:, :, None, ..., None]).add_(minimum[:, :, None, ..., None])
        return codes


def _widen(bits: torch.Tensor) -> torch.Tensor:
    """uint8 bits of finite float8_e4m3fn numbers -> the numbers in float32. The bits are shifted into those of float16,
    whose exponent bias is 8 larger, because torch's own conversion is not vectorized."""
    wide = bits.to(torch.int16)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16).float().mul_(256.0)


def unpack(packed: torch.Tensor, parts: int) -> torch.Tensor:
    """uint8 [..., c] -> codes uint8 [..., parts * c]: part p lies in the bits from p * 8 / parts on."""
    bits = 8 // parts
    return torch.cat([(packed >> (part * bits)) & (2**bits - 1) for part in range(parts)], -1)


def _quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> codes [..., D] in int8 or float8_e4m3fn, and their scale float16 [...]."""
    x = x.float()
    scale = (x.abs().amax(-1) / _MAX_CODE[dtype]).clamp_max(_MAX_HALF).half()
    wide = scale.float()[..., None]
    codes = torch.where(wide > 0, x / wide, 0.0).clamp_(-_MAX_CODE[dtype], _MAX_CODE[dtype])
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scale


def _quantize_groups(
    x: torch.Tensor, bits: int, dim: int, clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 as x, scale and minimum float16 as x without `dim`: x = minimum + code * scale. clip: the part of the
    range that is cut off at either end, a power of two or 0."""
    levels, x = 2**bits - 1, x.float()
    low, high = (end.clamp_(-_MAX_HALF, _MAX_HALF) for end in x.aminmax(dim=dim, keepdim=True))
    margin = (high - low) * clip
    low = (low + margin).half()
    scale = ((high - margin - low.float()) / levels).clamp_(0, _MAX_HALF).half()
    codes = torch.where(scale > 0, (x - low.float()) / scale.float(), 0.0).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale.squeeze(dim), low.squeeze(dim)


def stored_tokens(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [..., D] as int8 or float8_e4m3fn pages give them back, in their dtype."""
    codes, scale = _quantize_tokens(x, dtype)
    return (codes.float() * scale.float()[..., None]).to(x.dtype)


def stored_keys(k: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Keys [..., S, D] as int4 or int2 pages give them back, in their dtype. S is a multiple of group."""
    codes, scale, low = _quantize_groups(k.unflatten(-2, (-1, group)), bits, -2, _KEY_CLIP[bits])
    return _from_groups(codes, scale.unsqueeze(-2), low.unsqueeze(-2)).flatten(-3, -2).to(k.dtype)


def stored_values(v: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Values [..., D] as int4 or int2 pages give them back, in their dtype. group: channels that share a scale, more
    where D is no multiple."""
    dim = v.shape[-1]
    parts = max(n for n in range(1, max(1, dim // group) + 1) if dim % n == 0)
    codes, scale, low = _quantize_groups(v.unflatten(-1, (parts, -1)), bits, -1)
    return _from_groups(codes, scale[..., None], low[..., None]).flatten(-2).to(v.dtype)


def _from_groups(codes, scale, low) -> torch.Tensor:
    return codes.float() * scale.float() + low.float()


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    parts = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = parts[0].clone()
    for part, code in enumerate(parts[1:], 1):
        packed |= code << (part * bits)
    return packed


def _written(mapping: torch.Tensor, count: int, name: str, what: str) -> torch.Tensor | slice:
    """An index of the entries that are not negative. Raises ValueError for an entry of `count` or more."""
    if mapping.numel() == 0:
        return slice(0)
    low, high = (int(x) for x in mapping.aminmax())
    if high >= count:
        index = (mapping >= count).nonzero()[0].tolist()
        raise ValueError(f"{name}{index} is {high}: allowed are -1 to {count - 1}, the {what} of the cache")
    return slice(None) if low >= 0 else mapping >= 0


def write_tokens(k, v, keys: Pages, values: Pages, slots: torch.Tensor) -> None:
    """k [T, Hk, D], v [T, Hk, Dv] into slots int64 [T] of the pages; negative ones are skipped."""
    size = keys.data.shape[1]
    chosen = _written(slots, len(keys.data) * size, "slot_mapping", "slots")
    at = slots[chosen] // size, slots[chosen] % size
    for x, pages in ((k[chosen], keys), (v[chosen], values)):
        if pages.scale is not None:
            x, scale = _quantize_tokens(x, pages.data.dtype)
            pages.scale[at] = scale
        if pages.data.dtype == torch.float8_e4m3fn:
            pages.data.view(torch.uint8)[at] = x.view(torch.uint8)
        else:
            pages.data[at] = x


def reshape_and_cache_cpu(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    """`flash_paged.reshape_and_cache` on a CPU, with its arguments."""
    write_tokens(k, v, *Pages.of_cache(k_cache, v_cache, k_scale, v_scale), slot_mapping)


def quantize_and_cache_cpu(k, v, k_cache, v_cache, k_scale, k_min, v_scale, v_min, group_mapping):
    """`flash_paged.quantize_and_cache` on a CPU, with its arguments."""
    group, bits = k.shape[1], 8 * k_cache.shape[-1] // k.shape[-1]
    groups = k_cache.shape[1] // group
    chosen = _written(group_mapping, len(k_cache) * groups, "group_mapping", "group slots")
    block, number = group_mapping[chosen] // groups, group_mapping[chosen] % groups
    tokens = number[:, None] * group + torch.arange(group)
    codes, scale, low = _quantize_groups(k[chosen], bits, 1, _KEY_CLIP[bits])
    k_cache[block[:, None], tokens] = _pack(codes, bits)
    k_scale[block, number], k_min[block, number] = scale, low
    codes, scale, low = _quantize_groups(v[chosen].unflatten(-1, (v_scale.shape[-1], -1)), bits, -1)
    v_cache[block[:, None], tokens] = _pack(codes.flatten(-2), bits)
    v_scale[block[:, None], tokens], v_min[block[:, None], tokens] = scale, low


def copy_blocks_cpu(k_cache, v_cache, mapping, scales):
    """`flash_paged.copy_blocks` on a CPU. scales: the other tensors of the cache."""
    chosen = _written(mapping, len(k_cache), "mapping", "blocks")
    source, destination = (mapping[chosen.all(1)] if isinstance(chosen, torch.Tensor) else mapping[chosen]).unbind(1)
    for tensor in (k_cache, v_cache, *scales):
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        raw[destination] = raw[source]


def check_blocks(table: torch.Tensor, pages: Pages) -> None:
    """Raises ValueError for a block that the cache does not have."""
    if table.numel() and int(table.max()) >= len(pages.data):
        index = (table >= len(pages.data)).nonzero()[0].tolist()
        raise ValueError(
            f"block_table{index} is {table[tuple(index)]}: allowed are -1 to {len(pages.data) - 1}, the blocks of the "
            "cache"
        )


def read_sequence(pages: Pages, block_table, b: int, length: int, first: int = 0, ring=None, quantized: int = 0):
    """The first `length` tokens of sequence b, through block_table [B, max_blocks] from the block of token `first` on.

    Tokens from `quantized` on come from `ring` [B, R, Hk, D], if there is one. Returns [length, Hk, D] and bool
    [length], False (and zeros) for tokens that were not read or whose block is -1; None in its place where all were
    read. Raises ValueError for more tokens than the table has room for.
    """
    size = pages.data.shape[1]
    stored = length if ring is None else min(quantized, length)
    if stored > block_table.shape[1] * size:
        raise ValueError(
            f"sequence {b} has {stored} tokens: allowed are {block_table.shape[1] * size}, {block_table.shape[1]} "
            f"blocks of {size} in block_table"
        )
    blocks = block_table[b, : -(-stored // size)].long()
    blocks = torch.where(torch.arange(len(blocks)) < first // size, -1, blocks)
    check_blocks(blocks, pages)
    present = blocks >= 0
    tokens = pages.read(blocks.clamp_min(0)).flatten(0, 1)[:stored]
    if ring is not None:
        newest = ring[b, torch.arange(stored, length) % ring.shape[1]]
        tokens = torch.cat([tokens, newest.to(tokens.dtype)])
    if bool(present.all()):
        return tokens, None
    present = torch.nn.functional.pad(present.repeat_interleave(size)[:stored], (0, length - stored), value=True)
    return tokens.masked_fill(~present[:, None, None], 0), present


def read_sequences(pages: Pages, block_table: torch.Tensor, stored: torch.Tensor, longest: int, first: torch.Tensor):
    """All sequences at once: the first `stored` (int64 [B]) tokens of each, from the block of token `first` (int64 [B])
    on. Returns [B, longest, Hk, D] and bool [B, longest], as `read_sequence`."""
    size = pages.data.shape[1]
    table = block_table[:, : -(-longest // size)].long()
    numbers = torch.arange(table.shape[1])
    present = (numbers * size < stored[:, None]) & (numbers >= first[:, None] // size) & (table >= 0)
    table = torch.where(present, table, 0)
    check_blocks(table, pages)
    tokens = pages.read(table.flatten()).unflatten(0, table.shape).flatten(1, 2)[:, :longest]
    if bool(present.all()) and int(stored.min()) == longest:
        return tokens, None
    present = present.repeat_interleave(size, 1)[:, :longest] & (torch.arange(longest) < stored[:, None])
    return tokens.masked_fill_(~present[..., None, None], 0), present


def gather_cache_cpu(
    k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale, v_scale, k_min, v_min, k_tail, v_tail,
    quantized_seqlens, num_tokens,
):  # fmt: skip
    """`flash_paged.gather_cache` on a CPU, with its arguments."""
    starts = cu_seqlens_k.tolist()
    quantized = [0] * len(starts) if quantized_seqlens is None else quantized_seqlens.tolist()
    results = []
    for pages, ring in zip(Pages.of_cache(k_cache, v_cache, k_scale, v_scale, k_min, v_min), (k_tail, v_tail)):
        gathered = pages.data.new_zeros(num_tokens, pages.data.shape[2], pages.dim, dtype=dtype)
        for b, (start, end) in enumerate(zip(starts, starts[1:])):
            gathered[start:end] = read_sequence(pages, block_table, b, end - start, 0, ring, quantized[b])[0]
        results.append(gathered)
    return tuple(results)
