"""Quantized keys and values in plain torch: how codes are chosen, packed and read (the layout: kv_formats.py).

Codes and scales are defined by float32 arithmetic, every operation rounded to nearest even, so that kernels can be held
to them bit for bit; dequantized numbers are float64.
"""

import torch

from .kv_formats import KEY_CLIP


MAX_CODE = {torch.int8: 127, torch.float8_e4m3fn: 448}
MAX_HALF = 65504.0


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> codes of `dtype` (int8 or float8_e4m3fn) [..., D] and scale float16 [...] with x = code * scale."""
    x = x.float()
    levels = x.new_full((), MAX_CODE[dtype])  # a tensor: by a number, CUDA multiplies with the rounded 1 / number
    scale = (x.abs().amax(-1) / levels).clamp(max=MAX_HALF).half()
    wide = scale.float()[..., None]
    codes = torch.where(wide > 0, x / wide, 0.0).clamp(-MAX_CODE[dtype], MAX_CODE[dtype])
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def quantize_groups(
    x: torch.Tensor, bits: int, dim: int, clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 as x, and scale and minimum, float16 as x but 1 in `dim`, with x = minimum + code * scale. clip: the
    part of the range that is cut off at either end, a power of two or 0."""
    levels, x = 2**bits - 1, x.float()
    low, high = (end.clamp(-MAX_HALF, MAX_HALF) for end in (x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)))
    margin = (high - low) * clip
    low = (low + margin).half()
    scale = ((high - margin - low.float()) / x.new_full((), levels)).clamp(0, MAX_HALF).half()
    codes = torch.where(scale > 0, (x - low.float()) / scale.float(), 0.0).round().clamp(0, levels)
    return codes.to(torch.uint8), scale, low


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., D] below 2**bits -> uint8 [..., D * bits / 8]: byte c holds channel c + p * D * bits / 8 at bit p *
    bits."""
    parts = codes.unflatten(-1, (8 // bits, -1))
    return sum((parts[..., p, :] << (p * bits)) for p in range(8 // bits)).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    return torch.cat([(packed >> (p * bits)) & (2**bits - 1) for p in range(8 // bits)], -1)


def dequantize_cache(k_cache, v_cache, k_scale=None, v_scale=None, k_min=None, v_min=None):
    """The pages [num_blocks, block_size, Hk, D or Dv] in float64, of any format."""
    if k_scale is None:
        return k_cache.double(), v_cache.double()
    if k_min is None:
        return tuple(
            cache.double() * scale.double()[..., None] for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
    bits = 8 * k_cache.shape[-1] // k_scale.shape[-1]
    k, v = unpack_codes(k_cache, bits).double(), unpack_codes(v_cache, bits).double()
    k_scale, k_min = (x.double().repeat_interleave(k.shape[1] // x.shape[1], dim=1) for x in (k_scale, k_min))
    v_scale, v_min = (x.double().repeat_interleave(v.shape[-1] // x.shape[-1], dim=-1) for x in (v_scale, v_min))
    return k_min + k * k_scale, v_min + v * v_scale


def reshape_and_cache_reference(k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None):
    """k [T, Hk, D] and v [T, Hk, Dv] written in place to slot block * block_size + offset, quantized to the dtype of
    the cache where there are scales; negative slots and slots beyond the cache are skipped."""
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        codes, scales = (x, None) if scale is None else quantize_tokens(x, cache.dtype)
        for token, slot in enumerate(slot_mapping.tolist()):
            block, offset = divmod(slot, cache.shape[1])
            if 0 <= block < cache.shape[0]:
                cache[block, offset] = codes[token]
                if scale is not None:
                    scale[block, offset] = scales[token]


def quantize_and_cache_reference(k, v, k_cache, v_cache, k_scale, k_min, v_scale, v_min, group_mapping):
    """Groups of tokens k [n, G, Hk, D], v [n, G, Hk, Dv], group i in place to group slot group_mapping[i] (block *
    (block_size / G) + its number in the block; others are skipped), in as many bits as the caches have for a channel.
    """
    tokens, bits, channel_groups = k.shape[1], 8 * k_cache.shape[-1] // k.shape[-1], v_scale.shape[-1]
    groups = k_cache.shape[1] // tokens
    for i, slot in enumerate(group_mapping.tolist()):
        block, group = divmod(slot, groups)
        if not 0 <= block < k_cache.shape[0]:
            continue
        rows = slice(group * tokens, (group + 1) * tokens)
        codes, scale, low = quantize_groups(k[i], bits, dim=0, clip=KEY_CLIP[bits])
        k_cache[block, rows] = pack_codes(codes, bits)
        k_scale[block, group], k_min[block, group] = scale[0], low[0]
        codes, scale, low = quantize_groups(v[i].unflatten(-1, (channel_groups, -1)), bits, dim=-1)
        v_cache[block, rows] = pack_codes(codes.flatten(-2), bits)
        v_scale[block, rows], v_min[block, rows] = scale[..., 0], low[..., 0]


def copy_blocks_reference(k_cache, v_cache, mapping, *scales):
    """Block mapping[i, 0] becomes the content of block mapping[i, 1], in every tensor; pairs with a block outside the
    cache are skipped."""
    for source, target in mapping.tolist():
        if 0 <= source < k_cache.shape[0] and 0 <= target < k_cache.shape[0]:
            for tensor in (k_cache, v_cache, *scales):
                tensor[target] = tensor[source]


def gather_sequence(pages, block_table, length, tail=None, quantized=0):
    """The tokens of one sequence: `pages` [num_blocks, block_size, Hk, D] through block_table [max_blocks], from token
    `quantized` on the ring `tail` [R, Hk, D]. Returns [length, Hk, D] and bool [length], False (and zeros) where the
    table says -1.
    """
    token = torch.arange(length, device=pages.device)
    in_tail = token >= (length if tail is None else quantized)
    block = block_table[torch.where(in_tail, 0, token // pages.shape[1])].long()
    visible = in_tail | (block >= 0)
    gathered = pages.new_zeros((length, *pages.shape[2:]))
    in_page = visible & ~in_tail
    gathered[in_page] = pages[block[in_page], (token % pages.shape[1])[in_page]]
    if tail is not None:
        gathered[in_tail] = tail[token[in_tail] % tail.shape[0]].to(pages.dtype)
    return gathered, visible


def gather_cache_reference(
    k_cache, v_cache, block_table, cu_seqlens_k, dtype, k_scale=None, v_scale=None, k_min=None, v_min=None, k_tail=None,
    v_tail=None, quantized_seqlens=None, num_tokens=None,
):  # fmt: skip
    """Pages (and rings) of all sequences one after the other, dequantized to `dtype`.

    Returns k [num_tokens, Hk, D] and v [num_tokens, Hk, Dv], 0 where the table says -1 and behind the last sequence.
    """
    pages = dequantize_cache(k_cache, v_cache, k_scale, v_scale, k_min, v_min)
    starts = cu_seqlens_k.tolist()
    out = []
    for cache, tail in zip(pages, (k_tail, v_tail)):
        rows = cache.new_zeros((starts[-1] if num_tokens is None else num_tokens, *cache.shape[2:]))
        for sequence, (start, stop) in enumerate(zip(starts, starts[1:])):
            ring = () if tail is None else (tail[sequence], int(quantized_seqlens[sequence]))
            rows[start:stop] = gather_sequence(cache, block_table[sequence], stop - start, *ring)[0]
        out.append(rows.to(dtype))
    return tuple(out)
