"""Inputs of a linear layer in 4 or 6 bits, as a reference: rounded, and held as floats."""

import torch


COLUMNS = 16  # that share a grid, as in NVFP4


def round_inputs(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x [..., K], of a float dtype, rounded to `bits` bits: in each row every 16 columns have a grid of 2^bits values
    from their least to their largest."""
    columns, levels = x.shape[-1], 2**bits - 1
    groups = x.float()
    if columns % COLUMNS:
        groups = torch.cat([groups, groups[..., -1:].expand(*x.shape[:-1], -columns % COLUMNS)], -1)
    groups = groups.unflatten(-1, (-1, COLUMNS))
    low = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - low) / levels
    codes = ((groups - low) / torch.where(step > 0, step, 1)).round_()
    return codes.mul_(step).add_(low).flatten(-2)[..., :columns].to(x.dtype)
