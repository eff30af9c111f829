"""Exact Optimal Brain Surgeon equals brute force, and bounds the methods that approximate it."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from sample_layers import damped, layer, least_squares, output_error

from hf_efficient.pruning import obs, prune
from hf_efficient.pruning.mask import Sparsity


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
            before = least_squares(weight[row], masks[row], hessian)[1]
            best, error = least_squares(weight[row], others, hessian)
            tried.append((error - before, row, column, best))
        _, row, column, best = min(tried, key=lambda t: t[0])
        masks[row].remove(column)
        result[row] = best
        left[group(row, column)] -= 1

    def open(rows):
        return [(row, k) for row in rows for k in masks[row] if left[group(row, k)]]

    for competing in [range(rows)] if by_layer else [[row] for row in range(rows)]:
        while found := open(competing):
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
    weight, _, inputs = layer(rows, columns)
    pruned, mask = prune(weight, "obs", target, inputs)
    expected = _brute_force(weight, damped(inputs, 1e-4), target)
    assert torch.equal(mask, expected != 0) and mask.sum() == target.kept(rows, columns)
    # both solve the same systems in float64, conditioned by 1e4 at most
    torch.testing.assert_close(pruned.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_transposed_view_is_pruned_alike():
    weight, _, inputs = layer(3, 8)
    expected, mask = prune(weight, "obs", Sparsity(0.5), inputs)
    pruned, own = prune(weight.T.contiguous().T, "obs", Sparsity(0.5), inputs)
    assert torch.equal(own, mask) and torch.equal(pruned, expected)


def test_no_mask_of_all_is_much_better_and_other_methods_are_not():
    """Of 12 weights all 924 halves can be tried. Removing one at a time is not always the best of all."""
    ratios = {"obs": [], "alps": [], "magnitude": []}
    for seed in range(6):
        weight, _, inputs = layer(1, 12, seed)
        hessian = damped(inputs, 1e-4)
        least = min(
            least_squares(weight[0].double(), list(kept), hessian)[1] for kept in itertools.combinations(range(12), 6)
        )
        for method, own in ratios.items():
            own.append(output_error(weight, prune(weight, method, Sparsity(0.5), inputs)[0], hessian) / least)
    assert min(min(own) for own in ratios.values()) > 1 - 1e-6
    assert sum(ratios["obs"]) / 6 < 2 and sum(ratios["alps"]) / 6 < 4 < sum(ratios["magnitude"]) / 6, ratios


def test_large_layers_are_refused_before_work_starts():
    with pytest.raises(ValueError, match=r"small layers.*\[1024, 1024\].*sparsegpt"):
        prune(torch.ones(1024, 1024), "obs", Sparsity(0.5), SimpleNamespace(hessian=torch.eye(1024)))
    assert obs.MOST_ELEMENTS < 1024**3
