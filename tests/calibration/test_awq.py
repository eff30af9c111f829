"""AWQ against the equations of the paper, in float64 on small matrices."""

import pytest
import torch
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_blocks import first_block, make, outputs, state_of
from test_folding import find

from hf_efficient import methods
from hf_efficient.calibration.awq import ALPHAS, candidate_scales, output_error, search_scale, transform
from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.folding import Folding
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.formats import AffineFormat
from hf_efficient.observers.linear_inputs import LinearInputs


def layer(rows=24, columns=40, tokens=64, seed=0, outliers=1.0):
    """Inputs X [tokens, K] with channels of different size and the statistics of them, a weight [N, K], float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    x = x * torch.exp(outliers * torch.randn(columns, generator=generator)) + 0.3
    inputs = LinearInputs(columns)
    inputs.update(x)
    return x, inputs, torch.randn(rows, columns, generator=generator)


def round_to_nearest(weight, format):
    """float64 weight -> its nearest grid points, by the formulas; the scale as float32 stores it."""
    result = torch.empty_like(weight)
    for row in range(len(weight)):
        for group in torch.arange(weight.shape[1]).split(format.group_size):
            w = weight[row, group]
            low, high = min(w.min().item(), 0.0), max(w.max().item(), 0.0)
            scale = (high - low) / format.levels
            zero = round(-low / scale)
            result[row, group] = ((w / scale).round() + zero).clamp(0, format.levels).sub(zero) * scale
    return result


def error(x, weight, rounded):
    return ((x.double() @ (weight.double() - rounded.double()).T) ** 2).sum().item()


def test_the_scale_is_the_best_of_the_papers_grid():
    """On an asymmetric grid: a symmetric one puts the largest weight of every group half way between two points, where
    float32 and float64 may differ."""
    x, inputs, weight = layer()
    format = AffineFormat(3, 16, symmetric=False)  # the last group has 8 columns
    magnitude, w = x.double().abs().mean(0), weight.double()
    relative = torch.cat([g.abs() / g.abs().amax(1, keepdim=True) for g in w.split(16, 1)], 1).mean(0)
    grid = [magnitude**alpha for alpha in ALPHAS]
    grid += [magnitude**alpha / relative ** (1 - alpha) for alpha in ALPHAS]
    losses = []
    for s, ours in zip(grid, candidate_scales([weight], [format], inputs), strict=True):
        s = s / (s.max() * s.min()).sqrt()
        assert_close(ours, s, 1e-5, 1e-3, "float32 means and powers")
        losses.append(error(x, w, round_to_nearest(w * s, format) / s))
        # a weight half way between two points may round either way
        assert output_error([weight], [format], inputs.hessian, ours) == pytest.approx(losses[-1], rel=5e-3)
    found = search_scale([weight], [format], inputs)
    chosen = next(i for i, s in enumerate(candidate_scales([weight], [format], inputs)) if torch.equal(s, found))
    assert losses[chosen] <= 1.01 * min(losses) and min(losses) < 0.95 * losses[0], "the least but for such ties"


def test_linears_that_share_inputs_share_the_loss():
    _, inputs, weight = layer()
    other, format = layer(seed=5)[2], AffineFormat(4, 8, False)
    together = output_error([weight, other], [format] * 2, inputs.hessian, inputs.mean_abs)
    each = [output_error([w], [format], inputs.hessian, inputs.mean_abs) for w in (weight, other)]
    assert together == pytest.approx(sum(each), rel=1e-6)
    both = [weight, other], [format] * 2
    losses = [output_error(*both, inputs.hessian, s) for s in candidate_scales(*both, inputs)]
    assert output_error(*both, inputs.hessian, search_scale(*both, inputs)) == min(losses)


FORMATS = st.builds(AffineFormat, st.sampled_from([2, 3, 4, 8]), st.sampled_from([8, 16, 24, -1, None]), st.booleans())


@settings(max_examples=25, deadline=None)
@given(FORMATS, st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(0, 2))
def test_clipping_never_errs_more_than_round_to_nearest(format, seed, dtype, outliers):
    x, inputs, weight = layer(seed=seed, outliers=outliers)
    weight = weight.to(dtype)
    errors = []
    for method in ("rtn", "awq"):
        tensors = methods.quantize(weight, format, method, inputs)
        assert {n: tuple(t.shape) for n, t in tensors.items()} == format.shapes(*weight.shape)
        assert {n: t.dtype for n, t in tensors.items()} == format.dtypes(dtype)
        errors.append(error(x, weight, format.dequantize(tensors, weight.shape[1], torch.float32)))
    assert errors[1] <= errors[0] * (1 + 1e-3) + 1e-6, "but for float32 sums"


@settings(max_examples=25, deadline=None)
@given(FORMATS, st.integers(0, 1000))
def test_scales_never_err_more_than_round_to_nearest(format, seed):
    x, inputs, weight = layer(seed=seed)
    scale = search_scale([weight], [format], inputs)
    tensors = [methods.quantize(weight * s, format, "rtn") for s in (1, scale)]
    plain, scaled = (format.dequantize(own, 40, torch.float32) for own in tensors)
    assert error(x, weight, scaled / scale) <= error(x, weight, plain) * (1 + 1e-3)


def test_scales_stay_within_the_range_of_float16():
    """One channel is 10^12 times as large as the smallest, and its weight times most scales is above 65504."""
    x, _, weight = layer()
    x[:, 5], x[:, 9], weight[3, 5] = x[:, 5] * 1e4, x[:, 9] * 1e-8, 20
    inputs, format = LinearInputs(40), AffineFormat(4, 8, False)
    inputs.update(x)
    weight = weight.half()
    scale = search_scale([weight], [format], inputs)
    assert not torch.equal(scale, torch.ones(40)) and (weight * scale).half().isfinite().all()
    losses = [output_error([weight], [format], inputs.hessian, own) for own in (scale, torch.ones(40))]
    assert losses[0] < losses[1]


def test_clipping_takes_the_best_candidate_of_a_single_group():
    """With one group a row nothing else interacts: the loss is that of brute force over shrunken ranges."""
    x, inputs, weight = layer(rows=6, columns=16, outliers=2.0)
    format = AffineFormat(3, 16, False)
    tensors = methods.quantize(weight, format, "awq", inputs)
    found = format.dequantize(tensors, 16, torch.float64)
    hessian = x.double().T @ x.double()
    for row, ours in zip(weight.double(), found):
        low, high = row.min().clamp_max(0), row.max().clamp_min(0)
        losses = []
        first = (-low / ((high - low) / 7)).round()
        for shrink in [1 - step / 20 for step in range(13)]:
            scale = shrink * (high - low) / 7
            for side in (0.0, 0.25, 0.5, 0.75, 1.0):
                zero = torch.lerp(first / shrink, 7 - (7 - first) / shrink, side).round().clamp(0, 7)
                e = ((row / scale).round() + zero).clamp(0, 7).sub(zero) * scale - row
                losses.append((e @ hessian @ e).item())
        e = ours - row
        assert (e @ hessian @ e).item() == pytest.approx(min(losses), rel=0.02), "but for zero points half way"


def test_dead_channels_and_zero_groups():
    x, _, weight = layer()
    x[:, [0, 7]] = 0
    weight[:, 16:32] = 0
    weight[3] = 0
    inputs = LinearInputs(40)
    inputs.update(x)
    format = AffineFormat(4, 16, False)
    scale = search_scale([weight], [format], inputs)
    assert scale.isfinite().all() and (scale > 0).all() and torch.equal(scale[[0, 7]], torch.ones(2))
    tensors = methods.quantize(weight * scale, format, "awq", inputs.scaled(1 / scale))
    rounded = format.dequantize(tensors, 40, torch.float32)
    assert rounded.isfinite().all() and not rounded[3].any() and not rounded[:, 16:32].any()
    dead = LinearInputs(40)
    dead.update(torch.zeros(4, 40))
    assert torch.equal(search_scale([weight], [format], dead), torch.ones(40))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt", "gpt2", "mixtral", "bert"])
def test_the_transform_changes_nothing_before_rounding(name):
    block = first_block(make(name), config := WeightOnlyConfig(bits=3, group_size=32, method="awq"))
    before, weights = outputs(block), {n: weight_of(m).clone() for n, m in block.linears.items()}
    plain = {n: loss(block, n, config) for n in block.linears}
    transform(block)
    exact = 1e-12 if name in ("opt", "gpt2", "bert") else 1e-6
    assert_close(outputs(block), before, exact, 1e-4, "norms of RMS type compute in float32")
    kept = {n.split(".")[-1] if name == "gpt2" else n.split(".", 2)[-1] for n in block.transforms}
    allowed = {"gpt2": {"c_proj"}, "bert": {n.split(".", 2)[-1] for n in block.linears}}.get(name, set())
    assert kept <= allowed
    assert any(not torch.equal(weight_of(block.linears[n]), weights[n]) for n in weights)
    for names in Folding(block).sites():
        if not any(n.endswith(("v_proj", "up_proj", "c_attn", "fc1", "value")) for n in names):
            after = sum(loss(block, n, config) for n in names)
            assert after <= sum(plain[n] for n in names) * 1.001, "linears that produce nothing gain by the search"


def loss(block, name, config) -> float:
    """Output error of round to nearest, in the units of the block's output."""
    weight, format = weight_of(block.linears[name]).float(), config.format()
    scale = 1 / block.transforms.get(name, {"input_scale": torch.ones(weight.shape[1])})["input_scale"]
    return output_error([weight], [format], block.statistics[name].hessian, scale)


def test_heads_of_a_group_get_one_scale():
    block = first_block(make("llama"), WeightOnlyConfig(bits=3, group_size=32, method="awq"))
    names, producer = find(block, Folding(block), "o_proj")
    own = [weight_of(block.linears[names[0]])], [block.formats[names[0]]], block.statistics[names[0]]
    scale = search_scale(*own, producer)
    heads = scale.view(2, 2, 16)
    assert torch.equal(heads[:, 0], heads[:, 1]) and scale.unique().numel() > 16


def test_other_methods_are_left_alone():
    block = first_block(make("llama"))
    before = state_of(block.module)
    transform(block)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.module.state_dict().items())
