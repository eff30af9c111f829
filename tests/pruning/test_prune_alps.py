"""ALPS: the kept weights have their least squares, and the mask is better than those chosen without looking at H."""

import pytest
import torch
from sample_layers import damped, layer, least_squares, output_error

from hf_efficient.pruning import prune
from hf_efficient.pruning.mask import Sparsity


def least_error(weight, mask, hessian) -> float:
    return sum(least_squares(row.double(), kept, hessian)[1] for row, kept in zip(weight, mask))


@pytest.mark.parametrize("target", [Sparsity(0.5), Sparsity(0.7, group="layer"), Sparsity.of_pattern(2, 4)], ids=str)
def test_a_better_mask_and_its_least_squares(target):
    weight, _, inputs = layer(24, 96)
    hessian = damped(inputs, 0.01)
    pruned, mask = prune(weight, "alps", target, inputs)
    assert mask.sum() == target.kept(24, 96) and not pruned[~mask].any()
    own, least = output_error(weight, pruned, hessian), least_error(weight, mask, hessian)
    assert least * (1 - 1e-6) < own < 1.02 * least  # ten steps of conjugate gradients are close, not there
    by_norm = target.mask(weight.abs() * inputs.mean_square.sqrt())
    assert own < 0.9 * least_error(weight, by_norm, hessian)


def test_inputs_that_are_zero_are_pruned_first_and_give_no_nan():
    weight, _, inputs = layer(8, 32)
    inputs.hessian[:, :16] = inputs.hessian[:16] = 0
    weight[:, :16] *= 1e3  # damping alone keeps them
    pruned, mask = prune(weight.bfloat16(), "alps", Sparsity(0.5), inputs)
    assert pruned.dtype is torch.bfloat16 and torch.equal(mask, torch.arange(32).expand(8, 32) >= 16)
    assert torch.equal(pruned[:, 16:], weight[:, 16:].bfloat16())  # what is left already gives the output
    inputs.hessian.zero_()
    assert prune(weight, "alps", Sparsity(0.5), inputs)[0].isfinite().all()
