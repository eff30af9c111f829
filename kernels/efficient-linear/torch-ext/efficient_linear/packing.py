"""The layouts the Triton kernels read: weights in the order in which matrix instructions want them in registers.

A weight [N, K] is cut into tiles of 16 rows and a tile into steps of 128 columns (256 for 3 bits). A step of a tile is
blocks of 128 words of 32 bits (1, 3, 2, 4 blocks for 2, 3, 4, 8 bits), a block 32 lanes of 4 words: one 128-bit load a
lane brings it exactly its part of the first operand of some matrix instructions m16n8k16 (or of one warp's part of
wgmma m64nNk16), and nothing has to be moved between lanes. With r = lane // 4, t = lane % 4, word i, instruction (or
plane) j = 0 .. 7 (15 for 3 bits) and half h = 0, 1, lane and word hold the codes of row r + 8 * (i % 2) and columns
16 * j + 8 * (i // 2) + 2 * t + h of the step. Where in the words of its lane a code stands:

integers (`pack_weight`), so that two codes of neighbouring columns stand 16 bits apart, in the halves of a register:
  2, 4, 8 bits   block j // n, bit 16 * h + bits * (j % n), n = 16 / bits
  3 bits         block j // 5, bit 16 * h + 3 * (j % 5), for j < 15; bits 0, 1, 2 of plane 15 are bit 16 * h + 15 of
                 blocks 0, 1, 2
codes of a codebook (`pack_codebook_weight`), each in a hexadecimal digit d = 2 * (j % 4) + h, as byte permutations
take them:
  4 bits         block j // 4, digit d
  2 bits         bits 2 * (j // 4) and up of digit d
  3 bits         two bits in block j // 8, from bit 2 * (j // 4 % 2) of digit d; the third in block 2, bit j // 4 of d

Example, 4-bit integers, lane 5 (r = 1, t = 1), word 2 of the first block: row 1, its hexadecimal digits from the
lowest are columns 10, 26, 42, 58, 11, 27, 43, 59.

Words lie in the order tile, step, block, lane, word; rows are padded to a multiple of 16 and columns to whole steps
with code 0. The result is int32 [N, W], contiguous: the rows do not correspond to rows of the weight, they only keep N
in the shape and spread the words evenly (W is exact when 16 divides N, else the last words are 0).
"""

import torch


ROWS = 16  # of a tile
COLUMNS = 128  # the most columns of one matrix product in the kernels, which have one scale


def check_layout(bits: int, group_size: int | None, allowed_bits: tuple[int, ...] = (2, 3, 4, 8)) -> None:
    """Raises ValueError for what the kernels cannot read; allowed: bits of `allowed_bits`, group_size 32, 64, a
    multiple of 128, -1 (one group a row) and None (one scale for the tensor)."""
    if bits not in allowed_bits:
        raise ValueError(f"bits={bits!r}: allowed are {allowed_bits}")
    if group_size in (None, -1, 32, 64):
        return
    if not isinstance(group_size, int) or group_size <= 0 or group_size % COLUMNS:
        raise ValueError(
            f"group_size={group_size!r}: allowed are 32, 64, a multiple of {COLUMNS}, -1 (one group a row) and "
            "None (one scale for the tensor)"
        )


def number_of_groups(in_features: int, group_size: int | None) -> int:
    """G of a scale [N, G]; the last group is short when group_size does not divide in_features."""
    return 1 if group_size in (None, -1) else -(-in_features // group_size)


def step_columns(bits: int) -> int:
    """Columns of a step: what one iteration of the kernels' loops takes."""
    return 256 if bits == 3 else 128


def _blocks(in_features: int, bits: int) -> int:
    """Blocks of 128 words in a tile."""
    return -(-in_features // step_columns(bits)) * (step_columns(bits) * bits // 256)


def packed_width(out_features: int, in_features: int, bits: int) -> int:
    """W of the packed weight int32 [out_features, W]."""
    words = -(-out_features // ROWS) * _blocks(in_features, bits) * 128
    return -(-words // out_features)


def pack_canonical(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., K], one a byte -> canonical qweight uint8, a little-endian stream of bits: [..., K] for 8 bits,
    [..., ceil(K/2)] for 4, [..., ceil(K/4)] for 2, [..., 3 * ceil(K/8)] for 3; padded with code 0."""
    if bits == 8:
        return codes
    count, width = (8, 3) if bits == 3 else (8 // bits, 1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count)).to(torch.int32)
    stream = sum(codes[..., i] << bits * i for i in range(count))
    return torch.stack([stream >> 8 * i & 255 for i in range(width)], dim=-1).flatten(-2).to(torch.uint8)


def unpack_canonical(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """Canonical qweight -> uint8 codes, one a byte, with those that fill the last bytes."""
    if bits == 8:
        return qweight
    count, width = (8, 3) if bits == 3 else (8 // bits, 1)
    parts = qweight.unflatten(-1, (-1, width)).to(torch.int32)
    stream = sum(parts[..., i] << 8 * i for i in range(width))
    mask = 2**bits - 1
    return torch.stack([(stream >> bits * i & mask).to(torch.uint8) for i in range(count)], dim=-1).flatten(-2)


def _positions(bits: int, codebook: bool):
    """Where codes stand in a step: tuples (plane j, half h, first bit of the code, number of bits, block, bit)."""
    for j in range(step_columns(bits) // 16):
        for h in range(2):
            digit = 4 * (2 * (j % 4) + h)
            if not codebook and bits == 3:
                if j < 15:
                    yield j, h, 0, 3, j // 5, 16 * h + 3 * (j % 5)
                else:
                    yield from ((j, h, block, 1, block, 16 * h + 15) for block in range(3))
            elif not codebook:
                yield j, h, 0, bits, j * bits // 16, 16 * h + bits * j % 16
            elif bits == 4:
                yield j, h, 0, 4, j // 4, digit
            else:
                yield j, h, 0, 2, j // 8, digit + 2 * (j // 4 % 2)
                if bits == 3:
                    yield j, h, 2, 1, 2, digit + j // 4


def _pack(qweight: torch.Tensor, bits: int, codebook: bool) -> torch.Tensor:
    if qweight.dtype != torch.uint8:
        raise TypeError(f"qweight has dtype {qweight.dtype}: allowed is torch.uint8")
    if qweight.dim() != 2 or 0 in qweight.shape:
        raise ValueError(f"qweight has shape {tuple(qweight.shape)}: allowed is [N, K * bits / 8] with N, K >= 1")
    if bits == 3 and qweight.shape[1] % 3:
        raise ValueError(f"qweight has shape {tuple(qweight.shape)}: allowed is [N, 3 * ceil(K / 8)] for 3 bits")
    codes = unpack_canonical(qweight, bits)
    out_features, in_features = codes.shape
    tiles, columns = -(-out_features // ROWS), step_columns(bits)
    steps = -(-in_features // columns)
    codes = torch.nn.functional.pad(codes, (0, steps * columns - in_features, 0, tiles * ROWS - out_features))
    # tile, row half, r, step, j, column half, t, h -> j, h, tile, step, r, t, column half, row half
    codes = codes.view(tiles, 2, 8, steps, columns // 16, 2, 4, 2).permute(4, 7, 0, 3, 2, 6, 5, 1)
    words = codes.new_zeros(tiles, steps, columns * bits // 256, 8, 4, 2, 2, dtype=torch.int32)
    for j, h, first, count, block, bit in _positions(bits, codebook):
        words[:, :, block] |= (codes[j, h] >> first & 2**count - 1).to(torch.int32) << bit
    width = packed_width(out_features, in_features, bits)
    words = words.flatten()
    return torch.nn.functional.pad(words, (0, out_features * width - words.numel())).view(out_features, width)


def unpack_codes(packed: torch.Tensor, in_features: int, bits: int, codebook: bool = False) -> torch.Tensor:
    """The packed weight int32 [N, W] (of codes of a codebook?) -> codes uint8 [N, in_features], one a byte."""
    out_features, columns = packed.shape[0], step_columns(bits)
    tiles, steps = -(-out_features // ROWS), -(-in_features // columns)
    words = packed.flatten()[: tiles * _blocks(in_features, bits) * 128].view(tiles, steps, -1, 8, 4, 2, 2)
    codes = packed.new_zeros(columns // 16, 2, tiles, steps, 8, 4, 2, 2, dtype=torch.uint8)
    for j, h, first, count, block, bit in _positions(bits, codebook):
        codes[j, h] |= (words[:, :, block] >> bit & 2**count - 1).to(torch.uint8) << first
    codes = codes.permute(2, 7, 4, 3, 0, 6, 5, 1).reshape(tiles * ROWS, steps * columns)
    return codes[:out_features, :in_features].contiguous()


def pack_weight(qweight: torch.Tensor, bits: int, group_size: int | None) -> torch.Tensor:
    """Canonical codes uint8 (8 bits [N, K]; 4 bits [N, ceil(K/2)], even columns in the low nibble; 2 bits
    [N, ceil(K/4)], element i from bit 2 * (i % 4); 3 bits [N, 3 * ceil(K/8)], eight elements in three bytes, element i
    from bit 3 * i) -> int32 [N, W] in the layout above, on the same device. The layout does not depend on group_size,
    which is only checked.

    Raises TypeError or ValueError for another dtype, another rank, no rows or columns, bits or group_size not
    served."""
    check_layout(bits, group_size)
    return _pack(qweight, bits, codebook=False)


def unpack_weight(packed: torch.Tensor, in_features: int, bits: int, group_size: int | None) -> torch.Tensor:
    """The inverse of `pack_weight`, bit for bit: int32 [N, W] -> canonical uint8 of in_features columns.

    Raises ValueError when `packed` cannot be a weight of in_features columns."""
    check_layout(bits, group_size)
    check_packed(packed, in_features, bits)
    return pack_canonical(unpack_codes(packed, in_features, bits), bits)


def pack_codebook_weight(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """As `pack_weight` for the codes of a codebook of 2^bits entries, bits 2, 3 or 4."""
    check_layout(bits, None, (2, 3, 4))
    return _pack(qweight, bits, codebook=True)


def unpack_codebook_weight(packed: torch.Tensor, in_features: int, bits: int) -> torch.Tensor:
    """The inverse of `pack_codebook_weight`, bit for bit."""
    check_layout(bits, None, (2, 3, 4))
    check_packed(packed, in_features, bits)
    return pack_canonical(unpack_codes(packed, in_features, bits, codebook=True), bits)


def check_packed(packed: torch.Tensor, in_features: int, bits: int) -> None:
    """Raises TypeError or ValueError when `packed` cannot be a weight int32 [N, W] of in_features columns."""
    if packed.dtype != torch.int32:
        raise TypeError(f"packed has dtype {packed.dtype}: allowed is torch.int32, what pack_weight returns")
    if in_features < 1:
        raise ValueError(f"in_features={in_features}: allowed is 1 or more")
    if packed.dim() != 2 or not packed.is_contiguous():
        raise ValueError(f"packed has shape {tuple(packed.shape)}: allowed is a contiguous [N, W] from pack_weight")
    expected = (packed.shape[0], packed_width(packed.shape[0], in_features, bits))
    if packed.shape != expected:
        raise ValueError(
            f"packed has shape {tuple(packed.shape)}: a weight of in_features={in_features}, bits={bits} has {expected}"
        )
