"""SmoothQuant against the equations of the paper, in float64 on small matrices."""

import pytest
import torch
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_blocks import first_block, make, outputs, state_of

from hf_efficient.calibration import smoothquant
from hf_efficient.calibration.folding import Folding
from hf_efficient.calibration.smoothquant import candidate_scales, output_error, sample_rows, search_scale
from hf_efficient.configs import W8A8Config
from hf_efficient.observers.hooks import watching_inputs
from hf_efficient.observers.linear_inputs import LinearInputs


SMOOTH = W8A8Config(method="smoothquant")


def layer(seed=0, rows=24, columns=64, tokens=96, outlier=40.0):
    """Inputs with a few channels `outlier` times as large as the others, their statistics, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, torch.randperm(columns, generator=generator)[:3]] *= outlier
    inputs = LinearInputs(columns, hessian=False)
    inputs.update(x)
    return x, inputs, torch.randn(rows, columns, generator=generator)


def int8_outputs(x, weight):
    """Outputs of int8 arithmetic in float64: tokens on grids that span their range, rows of the weight symmetric."""
    low, high = x.amin(1, keepdim=True).clamp_max(0), x.amax(1, keepdim=True).clamp_min(0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    x = ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale
    scale = weight.abs().amax(1, keepdim=True) / 127
    return x @ ((weight / scale).round().clamp(-127, 127) * scale).T


def test_scales_stay_within_the_range_of_float16():
    x, _, weight = layer()
    x[:, 5], x[:, 9], weight[3, 5] = x[:, 5] * 1e4, x[:, 9] * 1e-8, 20
    inputs = LinearInputs(64, hessian=False)
    inputs.update(x)
    scale = search_scale([weight.half()], [(SMOOTH.format(), SMOOTH)], inputs, x)
    assert not torch.equal(scale, torch.ones(64)) and (weight * scale).half().isfinite().all()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_scale_is_the_best_of_the_papers_grid(seed):
    x, inputs, weight = layer(seed)
    exact = x.double() @ weight.double().T
    grid = [torch.ones(64, dtype=torch.float64)]
    grid += [x.double().abs().amax(0) ** a / weight.double().abs().amax(0) ** (1 - a) for a in smoothquant.ALPHAS]
    losses = []
    for s, ours in zip(grid, candidate_scales([weight], inputs), strict=True):
        s = s / (s.max() * s.min()).sqrt()
        assert_close(ours, s, 1e-5, 1e-3, "float32 powers")
        difference = int8_outputs(x.double() / s, weight.double() * s) - exact
        losses.append((difference.square().sum(1) / exact.square().sum(1)).mean().item())
        # a value half way between two codes may round either way
        assert output_error([weight], [(SMOOTH.format(), SMOOTH)], x, ours) == pytest.approx(losses[-1], rel=0.02)
    found = search_scale([weight], [(SMOOTH.format(), SMOOTH)], inputs, x)
    chosen = next(i for i, s in enumerate(candidate_scales([weight], inputs)) if torch.equal(s, found))
    assert losses[chosen] <= 1.02 * min(losses) and min(losses) < 0.5 * losses[0]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([SMOOTH, W8A8Config(method="smoothquant", activations="static")]),
    st.floats(1, 100),
)
def test_smoothing_never_errs_more_on_the_sample(seed, config, outlier):
    x, inputs, weight = layer(seed, outlier=outlier)
    x[:, 5] = 0  # a dead channel
    weight[:, 6] = 0
    rounding = [(config.format(), config)]
    scale = search_scale([weight], rounding, inputs, x)
    assert scale.isfinite().all() and (scale > 0).all()
    assert output_error([weight], rounding, x, scale) <= output_error([weight], rounding, x, torch.ones(64))


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "gpt2", "bert"])
def test_the_transform_changes_nothing_before_rounding(name):
    block = first_block(make(name), SMOOTH)
    before = outputs(block)
    weights = state_of(block.module)
    smoothquant.transform(block)
    rms = 1e-12 if name in ("opt", "gpt2", "bert") else 1e-6
    assert_close(outputs(block), before, rms, 1e-4, "exact in real numbers")
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in block.module.state_dict().items())
    for linear, tensors in block.transforms.items():
        assert name in ("gpt2", "bert") and block.formats[linear].input_scale and list(tensors) == ["input_scale"]


def test_the_sample_is_rows_of_the_inputs():
    block = first_block(make("llama"), SMOOTH)
    names = [names[0] for names in Folding(block).sites()]
    seen = {}
    with watching_inputs({"x": block.linears[names[0]]}, seen.setdefault):
        outputs(block)
    rows = sample_rows(block, names)
    assert [r.shape for r in rows] == [(96, 64), (96, 64), (96, 64), (96, 96)]
    assert torch.equal(rows[0][:48], seen["x"].reshape(-1, 64).float())
