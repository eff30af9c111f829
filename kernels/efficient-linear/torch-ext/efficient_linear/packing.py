"""The layout the Triton kernels read: weights in the order in which matrix instructions want them in registers.

A weight [N, K] is cut into tiles of 16 rows, a tile into chunks of 16 * (16 / bits) columns (64 for 4 bits, 32 for 8),
a chunk into 32 lanes of 4 words of 32 bits: 16 bytes a lane, so that one 128-bit load brings a lane exactly its part
of the first operand of 16 / bits matrix instructions m16n8k16 (or of one warp's part of wgmma m64nNk16), and nothing
has to be moved between lanes. With r = lane // 4, t = lane % 4, word i, instruction j = 0 .. 16/bits - 1 and half h =
0, 1, the code of row r + 8 * (i % 2) and column 16 * j + 8 * (i // 2) + 2 * t + h stands at bit 16 * h + bits * j:

    (word >> bits * j) & (0x000F000F for 4 bits, 0x00FF00FF for 8)

are two codes of neighbouring columns in the two halves of a register; an OR with the bits of 128 (bfloat16) or 1024
(float16) makes both a number, without any conversion instruction. Example, 4 bits, lane 5 (r = 1, t = 1), word 2 of
the first chunk: row 1, its hexadecimal digits from the lowest are columns 10, 26, 42, 58, 11, 27, 43, 59.

Words lie in the order tile, chunk, lane, word; rows are padded to a multiple of 16 and columns to one of 128 with code
0. The result is int32 [N, W], contiguous: the rows do not correspond to rows of the weight, they only keep N in the
shape and spread the ceil(N/16) * 16 * Kp * bits / 32 words evenly (W is exact when 16 divides N, else the last words
are 0).
"""

import torch


ROWS = 16  # of a tile
COLUMNS = 128  # K is padded to a multiple of this: what one step of the kernels' loops takes


def check_layout(bits: int, group_size: int | None) -> None:
    """Raises ValueError for what the kernels cannot read; allowed: bits 4 and 8, group_size 32, 64, a multiple of 128,
    -1 (one group a row) and None (one scale for the tensor)."""
    if bits not in (4, 8):
        raise ValueError(f"bits={bits!r}: allowed are 4 and 8")
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


def number_of_chunks(in_features: int, bits: int) -> int:
    return -(-in_features // COLUMNS) * COLUMNS * bits // 256


def packed_width(out_features: int, in_features: int, bits: int) -> int:
    """W of the packed weight int32 [out_features, W]."""
    words = -(-out_features // ROWS) * number_of_chunks(in_features, bits) * 128
    return -(-words // out_features)


def pack_weight(qweight: torch.Tensor, bits: int, group_size: int | None) -> torch.Tensor:
    """Canonical codes uint8 ([N, K] for 8 bits, [N, ceil(K/2)] for 4, even columns in the low nibble) -> int32 [N, W]
    in the layout above, on the same device. The layout does not depend on group_size, which is only checked.

    Raises TypeError or ValueError for another dtype, another rank, no rows or columns, bits or group_size not
    served."""
    check_layout(bits, group_size)
    if qweight.dtype != torch.uint8:
        raise TypeError(f"qweight has dtype {qweight.dtype}: allowed is torch.uint8")
    if qweight.dim() != 2 or 0 in qweight.shape:
        raise ValueError(f"qweight has shape {tuple(qweight.shape)}: allowed is [N, K * bits / 8] with N, K >= 1")
    if bits == 4:
        codes = torch.stack((qweight & 15, qweight >> 4), dim=-1).flatten(1)
    else:
        codes = qweight
    out_features, in_features = codes.shape
    planes = 16 // bits
    tiles, chunks = -(-out_features // ROWS), number_of_chunks(in_features, bits)
    codes = torch.nn.functional.pad(codes, (0, chunks * 16 * planes - in_features, 0, tiles * ROWS - out_features))
    # tile, row half, r, chunk, j, column half, t, h -> tile, chunk, r, t, column half, row half, h, j
    codes = codes.view(tiles, 2, 8, chunks, planes, 2, 4, 2).permute(0, 3, 2, 6, 5, 1, 7, 4)
    words = codes.new_zeros(codes.shape[:6], dtype=torch.int32)
    for h in range(2):
        for j in range(planes):
            words |= codes[..., h, j].to(torch.int32) << (16 * h + bits * j)
    width = packed_width(out_features, in_features, bits)
    words = words.flatten()
    return torch.nn.functional.pad(words, (0, out_features * width - words.numel())).view(out_features, width)


def unpack_codes(packed: torch.Tensor, in_features: int, bits: int) -> torch.Tensor:
    """The packed weight int32 [N, W] -> codes uint8 [N, in_features], one a byte."""
    out_features, planes = packed.shape[0], 16 // bits
    tiles, chunks = -(-out_features // ROWS), number_of_chunks(in_features, bits)
    words = packed.flatten()[: tiles * chunks * 128].view(tiles, chunks, 8, 4, 2, 2)
    mask = 2**bits - 1
    codes = torch.stack(
        [
            torch.stack([(words >> (16 * h + bits * j) & mask).to(torch.uint8) for j in range(planes)], dim=-1)
            for h in range(2)
        ],
        dim=-2,
    )
    codes = codes.permute(0, 5, 2, 1, 7, 4, 3, 6).reshape(tiles * ROWS, chunks * 16 * planes)
    return codes[:out_features, :in_features].contiguous()


def unpack_weight(packed: torch.Tensor, in_features: int, bits: int, group_size: int | None) -> torch.Tensor:
    """The inverse of `pack_weight`, bit for bit: int32 [N, W] -> canonical uint8 ([N, K] for 8 bits, [N, ceil(K/2)]
    for 4).

    Raises ValueError when `packed` cannot be a weight of in_features columns."""
    check_layout(bits, group_size)
    check_packed(packed, in_features, bits)
    codes = unpack_codes(packed, in_features, bits)
    if bits == 8:
        return codes
    codes = torch.nn.functional.pad(codes, (0, in_features % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def check_packed(packed: torch.Tensor, in_features: int, bits: int) -> None:
    if packed.dtype != torch.int32:
        raise TypeError(f"packed has dtype {packed.dtype}: allowed is torch.int32, what pack_weight returns")
    if in_features < 1:
        raise ValueError(f"in_features={in_features}: allowed is 1 or more")
    if packed.dim() != 2 or not packed.is_contiguous():
        raise ValueError(f"packed has shape {tuple(packed.shape)}: allowed is a contiguous [N, W] from pack_weight")
    expected = (packed.shape[0], packed_width(packed.shape[0], in_features, bits))
    if packed.shape != expected:
        raise ValueError(
            f"packed has shape {tuple(packed.shape)}: "
            f"a weight of in_features={in_features}, bits={bits} has {expected}"
        )
