"""Copies whole blocks inside a cache."""

import torch
import triton
import triton.language as tl

from .config import launch_device


_TILE = 4096


@triton.jit
def copy_kernel(
    cache, mapping,
    stride_b, stride_r, stride_s, stride_pair,
    blocks,
    SUBROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copies TILE of the SIZE elements of one block, which lie as [rows, SUBROWS, COLUMNS] with contiguous columns."""
    pair = mapping + tl.program_id(0).to(tl.int64) * stride_pair
    source = tl.load(pair)
    target = tl.load(pair + 1)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = element // COLUMNS
    offset = row // SUBROWS * stride_r + row % SUBROWS * stride_s + element % COLUMNS
    valid = (source >= 0) & (source < blocks) & (target >= 0) & (target < blocks)
    inside = (element < SIZE) & valid
    tl.store(cache + target * stride_b + offset, tl.load(cache + source * stride_b + offset, mask=inside), mask=inside)


def rows_of_block(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """(stride of rows, stride of subrows, subrows, columns) of a block of `tensor` [num_blocks, ...] with up to 3 more
    dimensions: dimensions that lie without gaps are taken together."""
    dims = [(size, stride) for size, stride in zip(tensor.shape[1:], tensor.stride()[1:]) if size != 1]
    merged = [(1, 1)] if not dims or dims[-1][1] != 1 else []
    for size, stride in reversed(dims):
        if merged and stride == merged[0][0] * merged[0][1]:
            merged[0] = (size * merged[0][0], merged[0][1])
        else:
            merged.insert(0, (size, stride))
    (_, stride_r), (subrows, stride_s), (columns, _) = [(1, 0)] * (3 - len(merged)) + merged
    return stride_r, stride_s, subrows, columns


def copy(tensors: list[torch.Tensor], mapping: torch.Tensor) -> None:
    """Launches `copy_kernel` once a tensor, on checked arguments: mapping int64 [n, 2]."""
    with launch_device(mapping):
        for tensor in tensors:
            size = tensor[:1].numel()
            if size == 0 or mapping.shape[0] == 0:
                continue
            stride_r, stride_s, subrows, columns = rows_of_block(tensor)
            block = min(_TILE, triton.next_power_of_2(size))
            copy_kernel[(mapping.shape[0], triton.cdiv(size, block))](
                tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor, mapping,
                tensor.stride(0), stride_r, stride_s, mapping.stride(0),
                tensor.shape[0],
                SUBROWS=subrows, COLUMNS=columns, SIZE=size, TILE=block, num_warps=4,
            )  # fmt: skip
