"""Weights coded along a trellis (QTIP, https://arxiv.org/abs/2406.11235) as the Triton kernel reads them.

A column of a weight [N, K] is cut into bands of 32 rows; up to 8 neighbouring bands are a sequence, a circular stream
of bits. The value of row r of a sequence is that of the 14 bits from bit floor(r * bits) on (`trellis_values`). The
canonical qweight, uint8 [bands * 4 * bits, K], holds the streams of a column one after another.

`packed` is int32 [words, columns]: each stream begins with a new word. A stream that does not end with a word is
followed by its own beginning, up to the end of the word after it. Columns are filled up with zeros to a multiple of 64,
and within 16 they stand in the order in which the lanes of a matrix instruction need them. `places` is int32 [bands,
3]: the bit where the band begins, and the first and the last word of its stream.
"""

import torch


BAND, MOST_BANDS = 32, 8
COLUMNS = 64  # of a step
LARGEST = 126  # magnitude of a value
HALF_BITS = tuple(range(3, 11))
FACTORS = 0x1E05, 0x8313
_SIX_BITS = 0x3F3F  # of each of two bytes


def trellis_values(states: torch.Tensor) -> torch.Tensor:
    """The integers, -126 to 126, of int32 states of 14 bits. Two products of 16 bits scramble a state: of the low half
    of the first and the high half of the second, six bits of each byte are added."""
    low = states * FACTORS[0] & 0xFFFF
    high = low.long() * FACTORS[1] >> 16
    both = (low & _SIX_BITS) + (high & _SIX_BITS)
    return ((both & 0xFF) + (both >> 8) - LARGEST).int()


def _streams(out_features: int, bits: float) -> list[tuple[int, int, int]]:
    """(bands, bytes of the canonical stream, bytes of the packed one) of each sequence."""
    total = -(-out_features // BAND)
    count = -(-total // MOST_BANDS)
    edges = [number * total // count for number in range(count + 1)]
    found = []
    for first, end in zip(edges, edges[1:]):
        size = int((end - first) * 4 * bits)
        found.append((end - first, size, size + (-size % 4 + 4 if size % 4 else 0)))
    return found


def trellis_places(out_features: int, bits: float, device: torch.device | None = None) -> torch.Tensor:
    """`places` of a weight: int32 [bands, 3]."""
    places, word = [], 0
    for bands, _, size in _streams(out_features, bits):
        places += [(32 * word + int(band * BAND * bits), word, word + size // 4 - 1) for band in range(bands)]
        word += size // 4
    return torch.tensor(places, dtype=torch.int32, device=device)


def _check(bits, out_features, in_features) -> None:
    if 2 * bits not in HALF_BITS:
        raise ValueError(f"bits={bits}: allowed is one of {[half / 2 for half in HALF_BITS]}")
    if out_features < 1 or in_features < 1:
        raise ValueError(f"a weight [{out_features}, {in_features}]: allowed are sizes of at least 1")


def check_trellis(packed, places, bits, out_features, in_features) -> None:
    """Raises TypeError or ValueError unless these are of a weight [out_features, in_features]."""
    _check(bits, out_features, in_features)
    shapes = (sum(size for _, _, size in _streams(out_features, bits)) // 4, -(-in_features // COLUMNS) * COLUMNS)
    for name, tensor, shape in (("packed", packed, shapes), ("places", places, (-(-out_features // BAND), 3))):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is torch.int32")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: a weight [{out_features}, "
                f"{in_features}] of {bits} bits needs a contiguous {list(shape)}"
            )


def pack_trellis(qweight: torch.Tensor, *, bits: float, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed, places) of the canonical qweight, uint8 [bands * 4 * bits, K], on its device.

    Raises TypeError or ValueError for another dtype, shape or number of bits.
    """
    in_features = qweight.shape[-1]
    _check(bits, out_features, in_features)
    streams = _streams(out_features, bits)
    if qweight.dtype != torch.uint8:
        raise TypeError(f"qweight has dtype {qweight.dtype}: allowed is torch.uint8")
    if qweight.dim() != 2 or len(qweight) != sum(size for _, size, _ in streams):
        raise ValueError(f"qweight has shape {tuple(qweight.shape)}: {out_features} rows of {bits} bits need another")
    parts = []
    for stream, (_, size, filled) in zip(qweight.split([size for _, size, _ in streams]), streams):
        parts += [stream, stream[: filled - size]]
    words = torch.cat(parts).view(-1, 4, in_features)
    words = torch.nn.functional.pad(words, (0, -in_features % COLUMNS))
    # within 16 columns: half, lane, one of two neighbours -> lane, half, one of two neighbours; bytes last
    words = words.view(len(words), 4, -1, 2, 4, 2).permute(0, 2, 4, 3, 5, 1).contiguous()
    return words.view(torch.int32).view(len(words), -1), trellis_places(out_features, bits, qweight.device)


def unpack_trellis(packed: torch.Tensor, *, bits: float, out_features: int, in_features: int) -> torch.Tensor:
    """The canonical qweight that was packed."""
    words = packed.view(len(packed), -1, 4, 2, 2).permute(0, 1, 3, 2, 4).contiguous().view(torch.uint8)
    stream = words.view(len(packed), -1, 4).transpose(1, 2).flatten(0, 1)[:, :in_features]
    parts, at = [], 0
    for _, size, filled in _streams(out_features, bits):
        parts.append(stream[at : at + size])
        at += filled
    return torch.cat(parts)


def columns_of_places(columns: int, device: torch.device) -> torch.Tensor:
    """The column that stands at each place of `packed`: int64 [columns]."""
    return torch.arange(columns, device=device).view(-1, 2, 4, 2).transpose(1, 2).flatten()
