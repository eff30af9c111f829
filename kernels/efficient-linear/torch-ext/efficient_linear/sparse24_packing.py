"""2:4 sparse weights: of every four neighbours in a row at most two are not zero, and only two are stored.

Rows are cut into tiles of 16, columns into rounds of 256, that is 64 groups of four columns. A group stores its first
and its second kept number, and one of six patterns: which positions they have. The order is that of packing.py: of the
matrix instruction (plane) j = 0 .. 15 of a round, lane 4 r + t has the groups of columns 16 j + 4 t of the rows
r and r + 8 (s = 0, 1).

values16 [ceil(N / 16), ceil(K / 256), 8, 128, 2] in the weight's dtype: block j // 2, word 4 * lane + 2 * (j % 2) + s,
    the first and the second number.
values4 uint8 [ceil(N / 16), ceil(K / 256), 2, 128, 4]: block j // 8, word 4 * lane + 2 * (j // 4 % 2) + s of 32 bits;
    the first code at bit 4 * (j % 4), the second one 16 bits higher.
places uint8 [ceil(N / 16), ceil(K / 256), 128, 4]: word 4 * lane + j // 4 of 32 bits; the pattern at bit
    8 * (j % 4) + 4 * s.
That is 9 bits a weight for 16-bit weights and 3 for 4-bit ones, plus scales.
"""

import torch


ROWS, COLUMNS = 16, 256  # of a tile and a round
PATTERNS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # kept positions of a group


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [tiles, rounds, 16 (j), 8 (r), 4 (t), 2 (s), 4 columns], padded with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % COLUMNS, 0, -rows % ROWS))
    return padded.view(-(-rows // ROWS), 2, 8, -(-columns // COLUMNS), 16, 4, 4).permute(0, 3, 4, 2, 5, 1, 6)


def _kept_positions(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [..., 4] with at most two true -> the first and second kept position, int64 [...], always two different
    ones."""
    # kept positions first, each kind in order: the second of fewer than two is a position that is not kept
    order = torch.argsort(torch.logical_not(kept).to(torch.uint8), dim=-1, stable=True)[..., :2].sort(-1).values
    return order[..., 0], order[..., 1]


def _check(weight: torch.Tensor, kept: torch.Tensor) -> None:
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}: allowed is [N, K] with N, K >= 1")
    padded = torch.nn.functional.pad(kept.to(torch.uint8), (0, -kept.shape[1] % 4))
    too_many = padded.unflatten(1, (-1, 4)).sum(-1) > 2
    if bool(too_many.any()):
        row, group = too_many.nonzero()[0].tolist()
        first = f"row {row} keeps more than 2 of the columns from {4 * group} on"
        raise ValueError(f"{first}: allowed are at most 2 of every 4")


def _pack_patterns(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Kept positions [tiles, rounds, j, r, t, s] -> places."""
    pattern = torch.zeros(4, 4, dtype=torch.uint8, device=first.device)
    for number, (a, b) in enumerate(PATTERNS):
        pattern[a, b] = number
    numbers = pattern[first, second].unflatten(2, (4, 4)).permute(0, 1, 4, 5, 2, 3, 6)  # r, t, word, byte, s
    return (numbers[..., 0] | numbers[..., 1] << 4).reshape(*first.shape[:2], 128, 4).contiguous()


def _stored(weight: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two stored numbers of each group, [tiles, rounds, j, r, t, s, 2], and places."""
    _check(weight, kept)
    first, second = _kept_positions(_groups(kept.to(torch.uint8)) != 0)
    return _groups(weight).gather(-1, torch.stack((first, second), -1)), _pack_patterns(first, second)


def pack_sparse24(weight: torch.Tensor, kept: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A float16 or bfloat16 (or float32) weight [N, K] -> (values16, places). kept: bool alike, what is stored; by
    default what is not zero.

    Raises ValueError where more than two of four neighbours are stored, naming the first such position."""
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"the weight has dtype {weight.dtype}: allowed is float16, bfloat16 or float32")
    numbers, places = _stored(weight, weight != 0 if kept is None else kept)
    numbers = numbers.unflatten(2, (8, 2)).permute(0, 1, 2, 4, 5, 3, 6, 7)  # block, r, t, j % 2, s, two
    return numbers.reshape(*places.shape[:2], 8, 128, 2).contiguous(), places


def pack_sparse24_codes(
    codes: torch.Tensor, zero: torch.Tensor | int = 8, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes 0 to 15 [N, K] -> (values4, places). kept: bool alike, what is stored; by default what is not `zero`,
    the code of a zero weight (a number, or uint8 [N, K]). Errors as `pack_sparse24`."""
    if codes.dtype != torch.uint8 or bool((codes > 15).any()):
        raise TypeError(f"codes is {codes.dtype}: allowed is torch.uint8 with values up to 15")
    numbers, places = _stored(codes, codes != zero if kept is None else kept)
    # tiles, rounds, block, half, byte, j % 2, r, t, s, two -> block, r, t, half, s, two, byte, j % 2
    numbers = numbers.unflatten(2, (2, 2, 2, 2)).permute(0, 1, 2, 6, 7, 3, 8, 9, 4, 5)
    return (numbers[..., 0] | numbers[..., 1] << 4).reshape(*places.shape[:2], 2, 128, 4).contiguous(), places


def unpack_sparse24(values: torch.Tensor, places: torch.Tensor, out_features: int, in_features: int):
    """The inverse: (weight or codes [N, K] with 0 where nothing is stored, bool [N, K] of what is stored)."""
    check_sparse24(values, places, out_features, in_features)
    tiles, rounds = places.shape[:2]
    if values.dtype == torch.uint8:
        numbers = torch.stack((values & 15, values >> 4), -1).view(tiles, rounds, 2, 8, 4, 2, 2, 2, 2, 2)
        numbers = numbers.permute(0, 1, 2, 5, 8, 9, 3, 4, 6, 7)  # block, half, byte, j % 2, r, t, s, two
    else:
        numbers = values.view(tiles, rounds, 8, 8, 4, 2, 2, 2).permute(0, 1, 2, 5, 3, 4, 6, 7)
    numbers = numbers.reshape(tiles, rounds, 16, 8, 4, 2, 2)
    patterns = torch.stack((places & 15, places >> 4), -1).view(tiles, rounds, 8, 4, 4, 4, 2)
    patterns = patterns.permute(0, 1, 4, 5, 2, 3, 6).reshape(numbers.shape[:-1]).long()
    positions = torch.tensor(PATTERNS, device=values.device)[patterns]
    dense = values.new_zeros(*numbers.shape[:-1], 4).scatter_(-1, positions, numbers)
    stored = torch.zeros(dense.shape, dtype=torch.bool, device=values.device).scatter_(-1, positions, True)
    shape = tiles * ROWS, rounds * COLUMNS
    return tuple(
        tensor.permute(0, 5, 3, 1, 2, 4, 6).reshape(shape)[:out_features, :in_features].contiguous()
        for tensor in (dense, stored)
    )


def check_sparse24(values: torch.Tensor, places: torch.Tensor, out_features: int, in_features: int) -> None:
    """Raises TypeError or ValueError when these cannot be a packed weight [out_features, in_features]."""
    size = -(-out_features // ROWS), -(-in_features // COLUMNS)
    four_bits = values.dtype == torch.uint8
    if not four_bits and values.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"values has dtype {values.dtype}: allowed is uint8 (4 bits), float16, bfloat16 or float32")
    if places.dtype != torch.uint8:
        raise TypeError(f"places has dtype {places.dtype}: allowed is torch.uint8")
    shapes = {"values": (*size, 2, 128, 4) if four_bits else (*size, 8, 128, 2), "places": (*size, 128, 4)}
    for name, tensor in (("values", values), ("places", places)):
        if tuple(tensor.shape) != shapes[name] or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: a weight [{out_features}, {in_features}] has {shapes[name]}, "
                "contiguous"
            )
