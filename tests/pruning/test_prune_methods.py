"""Wanda and SparseGPT against their definitions, computed densely in float64."""

import pytest
import torch
from helpers import assert_close
from sample_layers import damped, layer

from hf_efficient import methods
from hf_efficient.formats import AffineFormat
from hf_efficient.observers.linear_inputs import LinearInputs
from hf_efficient.pruning import available_methods, prune, sparsegpt
from hf_efficient.pruning.mask import Sparsity


TARGETS = (Sparsity(0.5), Sparsity(0.7, group="layer"), Sparsity.of_pattern(2, 4), Sparsity.of_pattern(3, 5))


def best(scores: list[float], kept: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:kept])


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_wanda_keeps_what_weighs_most_times_the_norm_of_its_input(target):
    weight, x, inputs = layer(6, 40)
    pruned, mask = prune(weight, "wanda", target, inputs)
    scores = weight.double().abs() * x.double().square().sum(0).sqrt()
    count, kept = target.competitors(6, 40)
    for own, chosen in zip(scores.reshape(-1, count).tolist(), mask.reshape(-1, count)):
        assert chosen.nonzero().flatten().tolist() == best(own, kept)
    assert torch.equal(pruned, torch.where(mask, weight, 0))


def definition_of_sparsegpt(weight, inputs, target: Sparsity, block: int):
    """Columns from left to right; after each, those to come are at their least squares given all before."""
    rows, columns = weight.shape
    dense, mask = weight.double(), torch.zeros_like(weight, dtype=torch.bool)
    hessian = damped(inputs, 0.01)
    costs = torch.stack([torch.linalg.inv(hessian[k:, k:])[0, 0] for k in range(columns)])
    result = dense.clone()
    for k in range(columns):
        if k % block == 0:
            end = min(k + block, columns)
            scores = result[:, k:end].square() / costs[k:end]
            _, kept = target.competitors(rows, columns)
            if not target.pattern:
                kept = round(kept * end / columns) - round(kept * k / columns)
            groups = scores.reshape(1, -1) if target.group == "layer" else scores
            for row, own in enumerate(groups.tolist()):
                places = torch.zeros(len(own), dtype=torch.bool)
                places[best(own, kept)] = True
                mask[row if len(groups) > 1 else slice(None), k:end] = places.view(-1, end - k)
        result[:, k] *= mask[:, k]
        done = slice(0, k + 1)
        if k + 1 < columns:
            pull = (dense[:, done] - result[:, done]) @ hessian[done, k + 1 :]
            result[:, k + 1 :] = dense[:, k + 1 :] + torch.linalg.solve(hessian[k + 1 :, k + 1 :], pull.T).T
    return result, mask


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_sparsegpt_is_its_definition(target, monkeypatch):
    monkeypatch.setattr(sparsegpt, "_BLOCK", 16)
    weight, _, inputs = layer(6, 60)
    pruned, mask = prune(weight, "sparsegpt", target, inputs)
    block = target.pattern[1] if target.pattern else 16
    expected, expected_mask = definition_of_sparsegpt(weight, inputs, target, block)
    assert torch.equal(mask, expected_mask) and mask.sum() == target.kept(6, 60)
    assert_close(pruned, expected, 1e-4, 1e-2, "float32 sums and a Cholesky factor instead of 60 inversions")
    assert (pruned[~mask] == 0).all()


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_what_is_known_of_the_inputs_pays(target):
    weight, x, inputs = layer(48, 160)
    errors = []
    for method in ("magnitude", "wanda", "sparsegpt"):
        pruned, mask = prune(weight, method, target, inputs)
        assert mask.reshape(-1, target.competitors(48, 160)[0]).sum(1).unique().numel() == 1 or method == "sparsegpt"
        errors.append((x @ (weight - pruned).T).norm().item())
    assert errors[0] > 1.5 * errors[1] and errors[1] > 1.05 * errors[2], errors


def test_rounding_with_gptq_makes_up_for_zeros_that_stay():
    weight, x, inputs = layer(24, 64)
    format, errors = AffineFormat(3, 32, False), {}
    pruned, mask = prune(weight, "sparsegpt", Sparsity.of_pattern(2, 4), inputs)
    for method in ("rtn", "gptq"):
        tensors = methods.quantize(pruned, format, method, inputs, mask=mask)
        restored = format.dequantize(tensors, 64, torch.float32)
        assert (restored[~mask] == 0).all()
        errors[method] = (x @ (weight - restored).T).norm().item()
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_an_input_that_is_never_there_is_pruned_first():
    weight, x, _ = layer(8, 32)
    x[:, ::4], weight[:, ::4] = 0, 1e3 * weight[:, ::4]
    inputs = LinearInputs(32)
    inputs.update(x)
    for method in ("wanda", "sparsegpt", "alps", "obs"):
        pruned, mask = prune(weight, method, Sparsity(0.25), inputs)
        assert pruned.isfinite().all() and not mask[:, ::4].any(), method


@pytest.mark.parametrize("method", ["sparsegpt", "alps", "obs"])
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[2]], ids=str)
def test_one_huge_input_leaves_the_others_their_say(method, target):
    weight, x, _ = layer(24, 64)
    x = x / x.square().mean(0).sqrt()
    x[:, 3] *= 1e4
    inputs, errors = LinearInputs(64), {}
    inputs.update(x)
    for each in ("wanda", method):
        change = (prune(weight, each, target, inputs)[0] - weight).double()
        errors[each] = (x.double() @ change.T).norm().item()
    assert errors[method] < 0.95 * errors["wanda"]


@pytest.mark.parametrize("method", ["sparsegpt", "alps", "obs"])
def test_weights_beyond_the_range_of_float16_are_refused(method):
    weight, _, inputs = layer(6, 40)
    weight = (weight / weight.abs().max() * 6e4).half()
    with pytest.raises(ValueError, match=f"method='{method}'.*beyond the range of torch.float16"):
        prune(weight, method, Sparsity(0.9), inputs)


@pytest.mark.parametrize("power", [100, -90])
@pytest.mark.parametrize("method", available_methods())
def test_weights_whose_squares_overflow_or_vanish_keep_the_same(method, power):
    weight, _, inputs = layer(6, 40)
    inputs.gradient, inputs.fisher = torch.rand(6, 40), torch.rand(6, 40)
    expected, kept = prune(weight, method, Sparsity(0.5), inputs)
    pruned, mask = prune(weight * 2.0**power, method, Sparsity(0.5), inputs)
    assert torch.equal(mask, kept) and torch.equal(pruned, expected * 2.0**power)


def test_methods_say_what_they_lack():
    with pytest.raises(ValueError, match="method='sparsegpt' needs hessian of the inputs"):
        prune(torch.ones(4, 4), "sparsegpt", Sparsity(0.5), LinearInputs(4, hessian=False))
    inputs = LinearInputs(4)
    inputs._hessian.fill_(torch.nan)
    with pytest.raises(ValueError, match="the Hessian of the inputs holds NaN"):
        prune(torch.ones(4, 4), "sparsegpt", Sparsity(0.5), inputs)
