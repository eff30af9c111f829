"""Pages on CPU: read, write, quantize, copy and gather, in full precision and in the quantized formats of
`flash_paged.kv_formats`, to the bit as `flash_paged.quantized_reference` says."""

from typing import NamedTuple

import torch


_MAX_CODE = {torch.int8: 127, torch.float8_e4m3fn: 448}
_MAX_HALF = torch.finfo(torch.float16).max


class Pages(NamedTuple):
    """The keys or the values of a cache: data [blocks, block_size, Hk, D or packed D] with their scales and minima, `dim`
    channels."""

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
        """[n, block_size, Hk, D] of these blocks (int64 [n]), float32 where quantized."""
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
    """uint8 bits of finite float8_e4m3fn numbers -> these in float32, through those of float16, whose exponents begin 8 lower:
    torch converts one number at a time."""
    wide = bits.to(torch.int16)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16).float().mul_(256.0)


def unpack(packed: torch.Tensor, parts: int) -> torch.Tensor:
    """uint8 [..., c] -> codes uint8 [..., parts * c]: part p lies in the bits from p * 8 / parts on."""
    bits = 8 // parts
    return torch.cat([(packed >> (part * bits)) & (2**bits - 1) for part in range(parts)], -1)


def _quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> codes [..., D] of int8 or float8_e4m3fn, scale float16 [...]."""
    x = x.float()
    scale = (x.abs().amax(-1) / _MAX_CODE[dtype]).clamp_max(_MAX_HALF).half()
    wide = scale.float()[..., None]
    codes = torch.where(wide > 0, x / wide, 0.0).clamp_(-_MAX_CODE[dtype], _MAX_CODE[dtype])
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scale


def _quantize_groups(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 as x, scale and minimum float16 as x without `dim`: x = minimum + code * scale."""
    levels, x = 2**bits - 1, x.float()
    low = x.amin(dim, keepdim=True).clamp_(-_MAX_HALF, _MAX_HALF).half()
    scale = ((x.amax(dim, keepdim=True) - low.float()) / levels).clamp_(0, _MAX_HALF).half()
    codes = torch.where(scale > 0, (x - low.float()) / scale.float(), 0.0).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale.squeeze(dim), low.squeeze(dim)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    parts = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = parts[0].clone()
    for part, code in enumerate(parts[1:], 1):
        packed |= code << (part * bits)
    return packed


def _kept(mapping: torch.Tensor, count: int, name: str, what: str) -> torch.Tensor | slice:
    """The entries that are not negative. Raises ValueError for one that is `count` or more."""
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
    kept = _kept(slots, len(keys.data) * size, "slot_mapping", "slots")
    place = slots[kept] // size, slots[kept] % size
    for x, pages in ((k[kept], keys), (v[kept], values)):
        if pages.scale is not None:
            x, scale = _quantize_tokens(x, pages.data.dtype)
            pages.scale[place] = scale
        if pages.data.dtype == torch.float8_e4m3fn:
            pages.data.view(torch.uint8)[place] = x.view(torch.uint8)
        else:
            pages.data[place] = x


def reshape_and_cache_cpu(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    write_tokens(k, v, *Pages.of_cache(k_cache, v_cache, k_scale, v_scale), slot_mapping)


def quantize_and_cache_cpu(k, v, k_cache, v_cache, k_scale, k_min, v_scale, v_min, group_mapping):
    group, bits = k.shape[1], 8 * k_cache.shape[-1] // k.shape[-1]
    groups = k_cache.shape[1] // group
    kept = _kept(group_mapping, len(k_cache) * groups, "group_mapping", "group slots")
    block, number = group_mapping[kept] // groups, group_mapping[kept] % groups
    tokens = number[:, None] * group + torch.arange(group)
    codes, scale, low = _quantize_groups(k[kept], bits, 1)
    k_cache[block[:, None], tokens] = _pack(codes, bits)
    k_scale[block, number], k_min[block, number] = scale, low
    codes, scale, low = _quantize_groups(v[kept].unflatten(-1, (v_scale.shape[-1], -1)), bits, -1)
    v_cache[block[:, None], tokens] = _pack(codes.flatten(-2), bits)
    v_scale[block[:, None], tokens], v_min[block[:, None], tokens] = scale, low


def copy_blocks_cpu(k_cache, v_cache, mapping, scales):
    kept = _kept(mapping, len(k_cache), "mapping", "blocks")
    source, destination = (mapping[kept.all(1)] if isinstance(kept, torch.Tensor) else mapping[kept]).unbind(1)
    for tensor in (k_cache, v_cache, *scales):
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        raw[destination] = raw[source]


def check_blocks(table: torch.Tensor, pages: Pages) -> None:
    """Raises ValueError for a block that the cache does not have."""
    if table.numel() and int(table.max()) >= len(pages.data):
        index = (table >= len(pages.data)).nonzero()[0].tolist()
        raise ValueError(
            f"block_table{index} is {table[tuple(index)]}: allowed are -1 to {len(pages.data) - 1}, the blocks of the cache"
        )


def read_row(pages: Pages, block_table, row: int, length: int, first: int = 0, tail=None, quantized: int = 0):
    """The first `length` tokens of a row, through block_table [B, max_blocks] from the block of token `first` on; from token
    `quantized` on those of the ring in `tail` [B, R, Hk, D], if there is one. Returns [length, Hk, D] and bool [length],
    where False (and 0) says that nothing was read or the table has -1, or None when there are all. Raises ValueError for
    more tokens than the table has room for."""
    size = pages.data.shape[1]
    stored = length if tail is None else min(quantized, length)
    if stored > block_table.shape[1] * size:
        raise ValueError(
            f"row {row} has {stored} tokens: allowed are {block_table.shape[1] * size}, {block_table.shape[1]} blocks of "
            f"{size} in block_table"
        )
    blocks = block_table[row, : -(-stored // size)].long()
    blocks = torch.where(torch.arange(len(blocks)) < first // size, -1, blocks)
    check_blocks(blocks, pages)
    present = blocks >= 0
    tokens = pages.read(blocks.clamp_min(0)).flatten(0, 1)[:stored]
    if tail is not None:
        ring = tail[row, torch.arange(stored, length) % tail.shape[1]]
        tokens = torch.cat([tokens, ring.to(tokens.dtype)])
    if bool(present.all()):
        return tokens, None
    present = torch.nn.functional.pad(present.repeat_interleave(size)[:stored], (0, length - stored), value=True)
    return tokens.masked_fill(~present[:, None, None], 0), present


def read_rows(pages: Pages, block_table: torch.Tensor, stored: torch.Tensor, longest: int, first: torch.Tensor):
    """All rows at once: the first `stored` (int64 [B]) tokens of each, from the block of token `first` (int64 [B]) on:
    [B, longest, Hk, D] and bool [B, longest], where False (and 0) says that nothing was read, or None when there are all."""
    size = pages.data.shape[1]
    table = block_table[:, : -(-longest // size)].long()
    places = torch.arange(table.shape[1])
    present = (places * size < stored[:, None]) & (places >= first[:, None] // size) & (table >= 0)
    table = torch.where(present, table, 0)
    check_blocks(table, pages)
    tokens = pages.read(table.flatten()).unflatten(0, table.shape).flatten(1, 2)[:, :longest]
    if bool(present.all()) and int(stored.min()) == longest:
        return tokens, None
    present = present.repeat_interleave(size, 1)[:, :longest] & (torch.arange(longest) < stored[:, None])
    return tokens.masked_fill_(~present[..., None, None], 0), present


def gather_cache_cpu(
    k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
    num_tokens,
):  # fmt: skip
    starts = cu_seqlens_k.tolist()
    quantized = [0] * len(starts) if quantized_seqlens is None else quantized_seqlens.tolist()
    results = []
    for pages, tail in zip(Pages.of_cache(k_cache, v_cache, k_scale, v_scale, k_min, v_min), (k_tail, v_tail)):
        gathered = pages.data.new_zeros(num_tokens, pages.data.shape[2], pages.dim, dtype=dtype)
        for row, (start, end) in enumerate(zip(starts, starts[1:])):
            gathered[start:end] = read_row(pages, block_table, row, end - start, 0, tail, quantized[row])[0]
        results.append(gathered)
    return tuple(results)
