"""ALPS: the kept weights have their least squares, and the mask is better than those chosen without looking at H."""

from types import SimpleNamespace

import pytest
import torch

from hf_efficient.pruning import prune
from hf_efficient.pruning.mask import Sparsity


def _layer(rows: int, columns: int):
    """A weight [rows, columns] and correlated inputs of unlike size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * columns, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    x = (x + 3 * torch.randn(x.shape, generator=generator)) * (0.1 + 2 * torch.rand(columns, generator=generator))
    weight = torch.randn(rows, columns, generator=generator)
    return weight, SimpleNamespace(hessian=x.T @ x, mean_square=x.square().mean(0))


def _least_squares(weight, hessian, mask) -> torch.Tensor:
    """float64: each row's kept weights at the least error of its output."""
    best = torch.zeros_like(weight, dtype=torch.float64)
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(hessian[kept][:, kept], hessian[kept] @ weight[row].double())
    return best


def _error(weight, pruned, hessian) -> float:
    change = weight.double() - pruned.double()
    return ((change @ hessian) * change).sum().item()


@pytest.mark.parametrize("target", [Sparsity(0.5), Sparsity(0.7, group="layer"), Sparsity.of_pattern(2, 4)], ids=str)
def test_a_better_mask_and_its_least_squares(target):
    weight, inputs = _layer(24, 96)
    mean = inputs.hessian.double().diagonal().mean()
    hessian = inputs.hessian.double() + 0.01 * mean * torch.eye(96)
    pruned, mask = prune(weight, "alps", target, inputs)
    assert mask.sum() == target.kept(24, 96) and not pruned[~mask].any()
    own, least = _error(weight, pruned, hessian), _error(weight, _least_squares(weight, hessian, mask), hessian)
    assert least * (1 - 1e-6) < own < 1.02 * least  # ten steps of conjugate gradients are close, not there
    by_norm = target.mask(weight.abs() * inputs.mean_square.sqrt())
    assert own < 0.9 * _error(weight, _least_squares(weight, hessian, by_norm), hessian)


def test_inputs_that_are_zero_are_pruned_first_and_give_no_nan():
    weight, inputs = _layer(8, 32)
    inputs.hessian[:, :16] = inputs.hessian[:16] = 0
    weight[:, :16] *= 1e-3  # what damping alone makes of them
    pruned, mask = prune(weight.bfloat16(), "alps", Sparsity(0.5), inputs)
    assert pruned.dtype is torch.bfloat16 and torch.equal(mask, torch.arange(32).expand(8, 32) >= 16)
    assert torch.equal(pruned[:, 16:], weight[:, 16:].bfloat16())  # what is left already gives the output
    inputs.hessian.zero_()
    assert prune(weight, "alps", Sparsity(0.5), inputs)[0].isfinite().all()
