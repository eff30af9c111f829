"""2:4 sparse weights: of every four neighbours in a row at most two are not zero, and only two are stored.

Tiles of 64 rows and 128 columns, that is 32 groups of four columns a row. A group stores the values of its first and
second kept position and a nibble that says which: bits 0-1 the first position, bits 2-3 the second.

values16: [ceil(N / 64), ceil(K / 128), 2, 64, 32] in the weight's dtype: first values of all groups, then second ones.
values4: uint8 [ceil(N / 64), ceil(K / 128), 64, 32]: codes of the first (low nibble) and second kept position.
places: uint8 [ceil(N / 64), ceil(K / 128), 64, 16]: the nibbles of group g (low) and g + 16 (high).
That is 9 bits a weight for 16-bit weights and 3 for 4-bit ones, plus scales.
"""

import torch


ROWS, COLUMNS = 64, 128  # of a tile


def _tiles(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [tiles, steps, 64, 32, 4], padded with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % COLUMNS, 0, -rows % ROWS))
    return padded.view(padded.shape[0] // ROWS, ROWS, -1, 32, 4).transpose(1, 2).contiguous()


def _kept_positions(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [..., 4] with at most two true -> the first and second kept position, int64 [...], always two different
    ones."""
    # kept positions first, each kind in order: the second of fewer than two is a position that is not kept
    order = torch.argsort(torch.logical_not(kept).to(torch.uint8), dim=-1, stable=True)[..., :2].sort(-1).values
    return order[..., 0], order[..., 1]


def _check(weight: torch.Tensor, kept: torch.Tensor) -> None:
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}: allowed is [N, K] with N, K >= 1")
    too_many = _tiles(kept.to(torch.uint8)).sum(-1) > 2
    if bool(too_many.any()):
        tile, step, row, group = too_many.nonzero()[0].tolist()
        first = f"row {tile * ROWS + row} keeps more than 2 of the columns from {step * COLUMNS + 4 * group} on"
        raise ValueError(f"{first}: allowed are at most 2 of every 4")


def _pack_positions(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    nibbles = (first | second << 2).to(torch.uint8)
    return (nibbles[..., :16] | nibbles[..., 16:] << 4).contiguous()


def pack_sparse24(weight: torch.Tensor, kept: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A float16 or bfloat16 (or float32) weight [N, K] -> (values16, places). kept: bool alike, what is stored; by
    default what is not zero.

    Raises ValueError where more than two of four neighbours are stored, naming the first such position."""
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"the weight has dtype {weight.dtype}: allowed is float16, bfloat16 or float32")
    kept = weight != 0 if kept is None else kept
    _check(weight, kept)
    tiles = _tiles(weight)
    first, second = _kept_positions(_tiles(kept.to(torch.uint8)) != 0)
    values = [tiles.gather(-1, position[..., None])[..., 0] for position in (first, second)]
    return torch.stack(values, 2), _pack_positions(first, second)


def pack_sparse24_codes(
    codes: torch.Tensor, zero: torch.Tensor | int = 8, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes 0 to 15 [N, K] -> (values4, places). kept: bool alike, what is stored; by default what is not `zero`,
    the code of a zero weight (a number, or uint8 [N, K]). Errors as `pack_sparse24`."""
    if codes.dtype != torch.uint8 or bool((codes > 15).any()):
        raise TypeError(f"codes is {codes.dtype}: allowed is torch.uint8 with values up to 15")
    kept = codes != zero if kept is None else kept
    _check(codes, kept)
    tiles = _tiles(codes)
    first, second = _kept_positions(_tiles(kept.to(torch.uint8)) != 0)
    low, high = (tiles.gather(-1, position[..., None])[..., 0] for position in (first, second))
    return low | high << 4, _pack_positions(first, second)


def unpack_sparse24(values: torch.Tensor, places: torch.Tensor, out_features: int, in_features: int):
    """The inverse: (weight or codes [N, K] with 0 where nothing is stored, bool [N, K] of what is stored)."""
    check_sparse24(values, places, out_features, in_features)
    if values.dtype == torch.uint8:
        parts = values & 15, values >> 4
    else:
        parts = values[:, :, 0], values[:, :, 1]
    nibbles = torch.cat((places & 15, places >> 4), -1).long()
    dense = values.new_zeros(*parts[0].shape, 4)
    stored = torch.zeros(dense.shape, dtype=torch.bool, device=values.device)
    for part, position in zip(parts, (nibbles & 3, nibbles >> 2)):
        dense.scatter_(-1, position[..., None], part[..., None])
        stored.scatter_(-1, position[..., None], True)
    shape = dense.shape[0] * ROWS, dense.shape[1] * COLUMNS
    return tuple(t.transpose(1, 2).reshape(shape)[:out_features, :in_features].contiguous() for t in (dense, stored))


def check_sparse24(values: torch.Tensor, places: torch.Tensor, out_features: int, in_features: int) -> None:
    tiles = -(-out_features // ROWS), -(-in_features // COLUMNS)
    four_bits = values.dtype == torch.uint8
    if not four_bits and values.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"values has dtype {values.dtype}: allowed is uint8 (4 bits), float16, bfloat16 or float32")
    if places.dtype != torch.uint8:
        raise TypeError(f"places has dtype {places.dtype}: allowed is torch.uint8")
    shapes = {"values": (*tiles, ROWS, 32) if four_bits else (*tiles, 2, ROWS, 32), "places": (*tiles, ROWS, 16)}
    for name, tensor in (("values", values), ("places", places)):
        if tuple(tensor.shape) != shapes[name] or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: a weight [{out_features}, {in_features}] has {shapes[name]}, "
                "contiguous"
            )
