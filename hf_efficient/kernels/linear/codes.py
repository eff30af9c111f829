"""Canonical packing of integer codes: each row is a little-endian stream of bits, padded with code 0.

A byte holds one code of 8 bits, two of 4 (the even element in the low nibble), four of 2 or eight of 1; three bytes
hold eight codes of 3 bits or four of 6.
"""

import torch
import torch.nn.functional as F


BITS = (2, 3, 4, 8)  # of the codes that kernels read
_IN_THREE_BYTES = {3: 8, 6: 4}  # bits -> codes


def packed_width(in_features: int, bits: int) -> int:
    """Bytes of a row of `in_features` codes."""
    count = _IN_THREE_BYTES.get(bits)
    return 3 * -(-in_features // count) if count else -(-in_features * bits // 8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., K] below 2^bits -> canonical qweight uint8 [..., packed_width(K, bits)]."""
    if bits == 8:
        return codes
    count = _IN_THREE_BYTES.get(bits) or 8 // bits
    if codes.shape[-1] % count:
        codes = F.pad(codes, (0, -codes.shape[-1] % count))
    if bits not in _IN_THREE_BYTES:
        packed = codes[..., 0::count].clone()
        for i in range(1, count):
            packed |= codes[..., i::count] << bits * i
        return packed
    stream = codes[..., 0::count].int()
    for i in range(1, count):
        stream |= codes[..., i::count].int() << bits * i
    return torch.stack([(stream >> shift & 255).to(torch.uint8) for shift in (0, 8, 16)], -1).flatten(-2)


def expand_groups(values: torch.Tensor, group_size: int | None, in_features: int) -> torch.Tensor:
    """Values per group [..., N, G] -> something that broadcasts against [..., N, in_features]."""
    if values.shape[-1] == 1:
        return values
    return values.repeat_interleave(group_size, -1)[..., :in_features]


def unpack_codes(qweight: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """Canonical qweight -> uint8 codes [..., in_features]."""
    if bits == 8:
        return qweight
    if count := _IN_THREE_BYTES.get(bits):
        low, middle, high = qweight.unflatten(-1, (-1, 3)).int().unbind(-1)
        stream = low | middle << 8 | high << 16
        codes = [(stream >> bits * i & 2**bits - 1).to(torch.uint8) for i in range(count)]
    else:
        codes = [qweight >> bits * i & 2**bits - 1 for i in range(8 // bits)]
    return torch.stack(codes, -1).flatten(-2)[..., :in_features]
