"""Bitshift trellis codes (QTIP, https://arxiv.org/abs/2406.11235) with a computed table of integers.

A column of a weight [N, K] is cut into bands of 32 rows, zeros filling up the last one. Up to `MOST_BANDS` neighbouring
bands are a sequence, which is a circular stream of bits. Row r of a sequence stands at bit floor(r * bits), and its
value is `table()[state]`, the state being the `STATE_BITS` bits from there on, the first one the lowest. So
neighbouring rows share most of their bits, and a row costs `bits` bits. With half bits, steps of two sizes alternate.

`qweight` is uint8 [bands * 4 * bits, K]: the streams of a column one after another, the first bit the lowest of its
byte. The code of a row is the bits between its window and that of the next row.
"""

import functools

import torch


TRELLIS_BITS = (1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)
BAND = 32  # rows
MOST_BANDS = 8  # of a sequence
STATE_BITS = 14
LARGEST = 126  # magnitude of a value
_FACTORS = 0x1E05, 0x8313  # of 200 random pairs that with the least squared error for normal numbers
_SIX_BITS = 0x3F3F  # of each of two bytes
_ELEMENTS_AT_ONCE = 1 << 21


@functools.cache
def table() -> torch.Tensor:
    """The value of each state: int8 [2 ** STATE_BITS], about normal with a standard deviation of 40.

    Two products of 16 bits scramble the state: the low half of the first, the high half of the second. The value is the
    sum of six bits of each of their four bytes, less its middle."""
    state = torch.arange(1 << STATE_BITS, dtype=torch.int32, device="cpu")
    low = state * _FACTORS[0] & 0xFFFF
    high = low.long() * _FACTORS[1] >> 16
    both = (low & _SIX_BITS) + (high & _SIX_BITS)
    return ((both & 0xFF) + (both >> 8) - LARGEST).to(torch.int8)


def bands(out_features: int) -> int:
    """Bands of a column."""
    return -(-out_features // BAND)


def sequences(out_features: int) -> list[int]:
    """The first band of each sequence of a column, and the number of bands."""
    total = bands(out_features)
    count = -(-total // MOST_BANDS)
    return [number * total // count for number in range(count + 1)]


def steps(bits: float) -> list[int]:
    """Bits of the code of each row of a band."""
    starts = [int(row * bits) for row in range(BAND + 1)]
    return [end - start for start, end in zip(starts, starts[1:])]


def pack_trellis(codes: torch.Tensor, bits: float) -> torch.Tensor:
    """uint8 codes [bands * 32, K] -> qweight uint8 [bands * 4 * bits, K]."""
    places = [(row, bit) for row, width in enumerate(steps(bits)) for bit in range(width)]
    grouped, packed = codes.view(-1, BAND, codes.shape[1]), []
    for first in range(0, len(places), 8):
        byte = torch.zeros_like(grouped[:, 0])
        for at, (row, bit) in enumerate(places[first : first + 8]):
            byte |= (grouped[:, row] >> bit & 1) << at
        packed.append(byte)
    return torch.stack(packed, 1).flatten(0, 1)


def unpack_trellis(qweight: torch.Tensor, bits: float, out_features: int) -> torch.Tensor:
    """qweight [..., bands * 4 * bits, K] -> the values int8 [..., out_features, K]."""
    width, found = int(4 * bits), []  # bytes of a band
    values = table().to(qweight.device)
    starts = sequences(out_features)
    for first, end in zip(starts, starts[1:]):
        stream = qweight[..., first * width : end * width, :]
        stream = torch.cat([stream, stream[..., :2, :]], -2)
        at = torch.tensor([int(row * bits) for row in range((end - first) * BAND)], device=qweight.device)
        byte, shift = at // 8, (at % 8).to(torch.int32)[:, None]
        step = max(1, _ELEMENTS_AT_ONCE // max(1, stream[..., 0, :].numel()))
        for here, by in zip(byte.split(step), shift.split(step)):
            state = stream.index_select(-2, here).int()
            for later in (1, 2):
                state |= stream.index_select(-2, here + later).int() << 8 * later
            state = (state >> by) & (1 << STATE_BITS) - 1
            found.append(values[state])
    return torch.cat(found, -2)[..., :out_features, :]
