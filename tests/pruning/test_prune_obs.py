"""Exact Optimal Brain Surgeon equals brute force, and bounds the methods that approximate it."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from hf_efficient.pruning import obs, prune
from hf_efficient.pruning.mask import Sparsity


def _layer(rows: int, columns: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)  # correlated
    return torch.randn(rows, columns, generator=generator), SimpleNamespace(hessian=(x.T @ x).float())


def _damped(inputs, damping: float) -> torch.Tensor:
    hessian = inputs.hessian.double()
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))


def _best(row: torch.Tensor, kept: list[int], hessian: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The least squares of the weights `kept` of one row, and its error."""
    best = torch.zeros_like(row)
    best[kept] = torch.linalg.solve(hessian[kept][:, kept], hessian[kept] @ row)
    return best, ((row - best) @ hessian @ (row - best)).item()


def _brute_force(weight: torch.Tensor, hessian: torch.Tensor, target: Sparsity) -> torch.Tensor:
    """Removes, one at a time, the weight whose removal and least squares afterwards give the least error of all."""
    weight = weight.double()
    rows, columns = weight.shape
    count, kept = target.competitors(rows, columns)
    masks = [list(range(columns)) for _ in range(rows)]
    result = weight.clone()
    left = [count - kept] * (weight.numel() // count)
    by_layer = target.group == "layer" and target.pattern is None

    def group(row, column):
        return (row * columns + column) // count

    def step(candidates):
        tried = []
        for row, column in candidates:
            others = [k for k in masks[row] if k != column]
            before = _best(weight[row], masks[row], hessian)[1]
            best, error = _best(weight[row], others, hessian)
            tried.append((error - before, row, column, best))
        _, row, column, best = min(tried, key=lambda t: t[0])
        masks[row].remove(column)
        result[row] = best
        left[group(row, column)] -= 1

    def open(rows):
        return [(row, k) for row in rows for k in masks[row] if left[group(row, k)]]

    if by_layer:
        while found := open(range(rows)):
            step(found)
    else:
        for row in range(rows):
            while found := open([row]):
                step(found)
    return result


@pytest.mark.parametrize(
    "rows, columns, target",
    [
        (1, 12, Sparsity(0.5)),
        (2, 12, Sparsity.of_pattern(2, 4)),
        (3, 12, Sparsity.of_pattern(2, 6)),
        (3, 4, Sparsity(0.5, group="layer")),
    ],
)
def test_equals_brute_force(rows, columns, target):
    weight, inputs = _layer(rows, columns)
    pruned, mask = prune(weight, "obs", target, inputs)
    expected = _brute_force(weight, _damped(inputs, 1e-4), target)
    assert torch.equal(mask, expected != 0) and mask.sum() == target.kept(rows, columns)
    # both solve the same systems in float64, conditioned by 1e4 at most
    torch.testing.assert_close(pruned.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_mask_of_all_is_much_better_and_other_methods_are_not():
    """Of 12 weights all 924 halves can be tried. Removing one at a time is not always the best of all."""
    ratios = {"obs": [], "alps": [], "magnitude": []}
    for seed in range(6):
        weight, inputs = _layer(1, 12, seed)
        hessian = _damped(inputs, 1e-4)
        least = min(_best(weight[0].double(), list(kept), hessian)[1] for kept in itertools.combinations(range(12), 6))
        for method, own in ratios.items():
            error = weight.double() - prune(weight, method, Sparsity(0.5), inputs)[0].double()
            own.append(((error @ hessian) * error).sum().item() / least)
    assert min(min(own) for own in ratios.values()) > 1 - 1e-6
    assert sum(ratios["obs"]) / 6 < 2 and sum(ratios["alps"]) / 6 < 4 < sum(ratios["magnitude"]) / 6, ratios


def test_large_layers_are_refused_before_work_starts():
    with pytest.raises(ValueError, match=r"small layers.*\[1024, 1024\].*sparsegpt"):
        prune(torch.ones(1024, 1024), "obs", Sparsity(0.5), SimpleNamespace(hessian=torch.eye(1024)))
    assert obs.MOST_ELEMENTS < 1024**3
