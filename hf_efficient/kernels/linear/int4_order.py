"""The order in which torch's CPU int4 operator stores codes. It depends on the instruction set, so it is found by
packing known codes."""

import functools

import torch


GROUPS = (256, 128, 64, 32)  # what the operator accepts


def native_group(group_size: int | None, in_features: int) -> int | None:
    """The largest group of the native operator that divides the row and whose borders include those of `group_size`."""
    whole_row = group_size is None or group_size == -1 or group_size >= in_features
    for group in GROUPS:
        if in_features % group == 0 and (whole_row or group_size % group == 0):
            return group
    return None


@functools.cache
def block_rows() -> int | None:
    """Rows of a block in torch's packed int4 layout on this machine, None if the layout is none that is understood."""
    for block in (64, 32, 16):
        rows = 2 * block + 16
        codes = torch.randint(16, (rows, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
        if torch.equal(unpack(packed, 64, block), codes.to(torch.uint8)):
            return block
    return None


@functools.cache
def is_known(rows: int) -> bool:
    """Whether codes [rows, K] come back from the packed layout bit for bit (tried once for each number of rows)."""
    if block_rows() is None:
        return False
    codes = torch.randint(16, (rows, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
    return torch.equal(unpack(packed, 64), codes.to(torch.uint8))


@functools.cache
def nibble_rows(block: int) -> torch.Tensor:
    """int64 [block]: the row within a block of each nibble of one column, all low nibbles first. Found by packing the
    digits of the row numbers, so it holds for any instruction set."""
    digits = []
    for shift in (0, 4):
        codes = (torch.arange(block, dtype=torch.int32) >> shift & 15)[:, None].expand(block, 2).contiguous()
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2).view(-1)[: block // 2]
        digits.append(torch.cat((packed & 15, packed >> 4)).long())
    return digits[0] + 16 * digits[1]


@functools.cache
def row_order(block: int) -> torch.Tensor | None:
    """int64 [block]: the nibble of each row of a block; None where rows stand in order."""
    rows = nibble_rows(block)
    return None if torch.equal(rows, torch.arange(block)) else torch.argsort(rows)


def block_runs(rows: int, block: int | None = None) -> list[tuple[int, int, int]]:
    """(first row, last row + 1, block) of the runs of equal blocks: the full blocks, then the rest."""
    block = block or block_rows()
    full = rows // block * block
    return [run for run in ((0, full, block), (full, rows, rows - full)) if run[1] > run[0]]


def unpack(packed: torch.Tensor, in_features: int, block: int | None = None) -> torch.Tensor:
    """torch's packed layout -> uint8 codes [N, K]."""
    runs = []
    for first, last, size in block_runs(packed.numel() * 2 // in_features, block):
        bytes_ = packed.view(-1)[first * in_features // 2 : last * in_features // 2].view(-1, in_features, size // 2)
        nibbles = torch.cat((bytes_ & 15, bytes_ >> 4), -1)[:, :, torch.argsort(nibble_rows(size))]
        runs.append(nibbles.transpose(1, 2).reshape(-1, in_features))
    return torch.cat(runs)


def unpack_rows(packed: torch.Tensor, in_features: int, ids: torch.Tensor, block: int) -> torch.Tensor:
    """Rows `ids`, int64 [n], of `unpack(packed, in_features, block)`, read from their blocks alone: uint8 [n, K]."""
    found = torch.zeros(len(ids), in_features, dtype=torch.uint8)
    for first, last, size in block_runs(packed.numel() * 2 // in_features, block):
        blocks = packed.view(-1)[first * in_features // 2 : last * in_features // 2].view(-1, in_features, size // 2)
        own = (ids - first).clamp(0, last - first - 1)
        digit = torch.argsort(nibble_rows(size))[own % size]
        codes = blocks[own // size, :, digit % (size // 2)] >> 4 * (digit >= size // 2).to(torch.uint8)[:, None] & 15
        found = torch.where(((ids >= first) & (ids < last))[:, None], codes, found)
    return found
