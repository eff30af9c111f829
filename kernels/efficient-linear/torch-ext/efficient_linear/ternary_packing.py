"""Ternary weights (-1, 0, 1): two layouts, and the way from one to the other.

For the kernel, 2 bits a weight: tiles of 64 rows and 128 columns, [ceil(N / 64), ceil(K / 128), 64, 32] bytes; bits 2 p
of byte c hold 1 + the weight of column c + 32 p of the tile. What one program reads in a step is 2 KiB in a row. For
storage, 1.6 bits a weight: five of them in the base-3 digits of a byte (3^5 = 243), lowest digit first.
"""

import torch


ROWS, COLUMNS = 64, 128  # of a tile


def _check_trits(trits: torch.Tensor) -> None:
    if trits.dtype != torch.int8:
        raise TypeError(f"trits has dtype {trits.dtype}: allowed is torch.int8")
    if trits.dim() != 2 or 0 in trits.shape:
        raise ValueError(f"trits has shape {tuple(trits.shape)}: allowed is [N, K] with N, K >= 1")
    if not bool((trits.abs() <= 1).all()):
        raise ValueError("trits has other values than -1, 0 and 1")


def pack_ternary(trits: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] of -1, 0, 1 -> uint8 [ceil(N / 64), ceil(K / 128), 64, 32] in the layout above.

    Raises TypeError for another dtype, ValueError for another rank or other values."""
    _check_trits(trits)
    rows, columns = trits.shape
    codes = torch.nn.functional.pad(trits, (0, -columns % COLUMNS, 0, -rows % ROWS)) + 1
    codes = codes.view(torch.uint8).view(codes.shape[0] // ROWS, ROWS, -1, 4, 32).transpose(1, 2)
    packed = codes[..., 0, :] | codes[..., 1, :] << 2 | codes[..., 2, :] << 4 | codes[..., 3, :] << 6
    return packed.contiguous()


def unpack_ternary(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_ternary`: int8 [out_features, in_features]."""
    check_ternary(packed, out_features, in_features)
    codes = torch.stack([packed >> 2 * part & 3 for part in range(4)], -2)  # tile, step, row, part, byte
    codes = codes.transpose(1, 2).reshape(packed.shape[0] * ROWS, packed.shape[1] * COLUMNS)
    return codes[:out_features, :in_features].to(torch.int8) - 1


def check_ternary(packed: torch.Tensor, out_features: int, in_features: int) -> None:
    """Raises TypeError or ValueError when `packed` cannot be a weight [out_features, in_features]."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed has dtype {packed.dtype}: allowed is torch.uint8, what pack_ternary returns")
    expected = (-(-out_features // ROWS), -(-in_features // COLUMNS), ROWS, 32)
    if tuple(packed.shape) != expected or not packed.is_contiguous():
        given, weight = tuple(packed.shape), f"[{out_features}, {in_features}]"
        raise ValueError(f"packed has shape {given}: a weight {weight} has {expected}, contiguous")


def pack_trits(trits: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] of -1, 0, 1 -> uint8 [N, ceil(K / 5)], five a byte. Errors as `pack_ternary`."""
    _check_trits(trits)
    digits = (torch.nn.functional.pad(trits, (0, -trits.shape[1] % 5)) + 1).view(torch.uint8).unflatten(1, (-1, 5))
    return sum(digits[..., digit] * 3**digit for digit in range(5))


def unpack_trits(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """The inverse of `pack_trits`: int8 [N, in_features].

    Raises TypeError or ValueError when `packed` cannot be such a weight."""
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed has dtype {packed.dtype}: allowed is torch.uint8, what pack_trits returns")
    if packed.dim() != 2 or packed.shape[1] != -(-in_features // 5):
        raise ValueError(f"packed has shape {tuple(packed.shape)}: allowed is [N, {-(-in_features // 5)}]")
    if bool((packed >= 243).any()):
        raise ValueError(f"packed has the byte {int(packed.max())}: five base-3 digits are at most 242")
    digits = torch.stack([packed // 3**digit % 3 for digit in range(5)], -1).flatten(1)
    return digits[:, :in_features].to(torch.int8) - 1
