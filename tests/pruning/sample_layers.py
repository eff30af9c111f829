"""A weight with correlated inputs, and what least squares make of it, for tests of pruning methods."""

import torch

from hf_efficient.observers.linear_inputs import LinearInputs


def layer(rows: int, columns: int, seed: int = 0):
    """(weight [rows, columns], correlated inputs of very different size, their statistics)."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) + 2 * torch.eye(columns)
    sizes = torch.rand(columns, generator=generator).mul_(3).exp_()
    x = torch.randn(4 * columns, columns, generator=generator) @ mix * sizes
    inputs = LinearInputs(columns)
    inputs.update(x)
    return torch.randn(rows, columns, generator=generator), x, inputs


def damped(inputs, damping: float) -> torch.Tensor:
    """The Hessian in float64, with `damping` times its mean diagonal added to the diagonal."""
    hessian = inputs.hessian.double()
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))


def least_squares(row: torch.Tensor, kept, hessian: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(the weights `kept` of a float64 row at the least error of its output, the others 0; that error)."""
    best = torch.zeros_like(row)
    best[kept] = torch.linalg.solve(hessian[kept][:, kept], hessian[kept] @ row)
    return best, ((row - best) @ hessian @ (row - best)).item()


def output_error(weight: torch.Tensor, pruned: torch.Tensor, hessian: torch.Tensor) -> float:
    change = weight.double() - pruned.double()
    return ((change @ hessian) * change).sum().item()
