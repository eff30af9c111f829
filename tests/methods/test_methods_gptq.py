"""GPTQ against brute force in float64, and what must hold whatever the inputs."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_efficient.formats import AffineFormat
from hf_efficient.formats.binary import PartlyBinaryFormat
from hf_efficient.methods import gptq, mse, pb_llm, rtn
from hf_efficient.methods._error_feedback import Feedback, output_error


def linear(rows: int, columns: int, seed: int = 0, rank: int | None = None):
    """A weight [rows, columns] and the inputs' statistics, columns correlated and of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    rank = rank or columns
    x = torch.randn(3 * columns, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    x *= torch.rand(columns, generator=generator) + 0.1
    weight = torch.randn(rows, columns, generator=generator)
    return weight, SimpleNamespace(hessian=x.T @ x, mean_square=x.square().mean(0), count=len(x))


def error(method, weight, format, inputs) -> torch.Tensor:
    """Squared change of the outputs on the calibration inputs, float64 [N]."""
    back = format.dequantize(method.quantize(weight, format, inputs), weight.shape[1], torch.float32)
    change = weight.double() - back.double()
    return (change @ inputs.hessian.double() * change).sum(1)


def to_grid(values: torch.Tensor) -> torch.Tensor:
    return (values * 2).round().clamp(-4, 3) / 2


def brute_force_obq(weight, hessian, order):
    """Optimal brain quantization with the inverse Hessian of the columns left, one at a time (float64)."""
    weight, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    for column in order:
        rounded = to_grid(weight[:, column])
        share = (weight[:, column] - rounded) / inverse[column, column]
        weight -= share[:, None] * inverse[column]
        weight[:, column] = rounded
        inverse -= inverse[:, column : column + 1] * inverse[column] / inverse[column, column]
        inverse[column] = inverse[:, column] = 0  # done, to the last bit
    return weight


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("rows, columns", [(16, 16), (3, 150)])  # 150: more than a block of columns
def test_codes_are_those_of_brute_force_obq(rows, columns, act_order):
    weight, inputs = linear(rows, columns)
    damped = inputs.hessian + 0.01 * inputs.hessian.diagonal().mean() * torch.eye(columns)
    order = inputs.hessian.diagonal().argsort(descending=True).tolist() if act_order else range(columns)
    expected = brute_force_obq(weight, damped, order)
    rounded = Feedback(inputs.hessian, 0.01, act_order).round(weight, lambda values, column: to_grid(values))
    assert torch.equal(rounded.double(), expected)
    assert not torch.equal(rounded, to_grid(weight))


def test_importance_is_the_cholesky_factor_of_the_inverse_as_in_the_paper():
    _, inputs = linear(1, 16)
    damped = inputs.hessian.double() + 0.01 * inputs.hessian.diagonal().mean().double() * torch.eye(16).double()
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    importance = Feedback(inputs.hessian, 0.01, act_order=False).importance
    torch.testing.assert_close(importance.double(), factor.diagonal() ** -2, rtol=1e-4, atol=0)


FORMATS = st.builds(AffineFormat, st.sampled_from([2, 3, 4, 8]), st.sampled_from([8, 12, -1, None]), st.booleans())


@settings(max_examples=40, deadline=None)
@given(FORMATS, st.integers(1, 12), st.integers(1, 40), st.integers(0, 10**6), st.integers(1, 40))
def test_error_on_the_calibration_inputs_is_never_above_that_of_rtn(format, rows, columns, seed, rank):
    weight, inputs = linear(rows, columns, seed, rank)
    ours, nearest = error(gptq, weight, format, inputs), error(rtn, weight, format, inputs)
    # float32 sums: a hundred thousandth of the largest output's square
    slack = 1e-5 * (nearest + 1e-2 * (weight.double() @ inputs.hessian.double() * weight).sum(1).abs())
    assert (ours.sum() <= (nearest + slack).sum()) if format.group_size is None else (ours <= nearest + slack).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits, group, symmetric", [(4, 64, False), (3, 64, True), (2, -1, False), (4, None, True)])
def test_tensors_are_the_formats_and_the_error_far_below_nearest(bits, group, symmetric, dtype):
    weight, inputs = linear(40, 144, rank=40)  # 144: the last group of 64 is short
    weight, format = weight.to(dtype), AffineFormat(bits, group, symmetric)
    tensors = gptq.quantize(weight, format, inputs)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == format.shapes(40, 144)
    assert {name: t.dtype for name, t in tensors.items()} == format.dtypes(dtype)
    ours, nearest, clipped = (error(method, weight, format, inputs).sum() for method in (gptq, rtn, mse))
    assert ours < 0.3 * nearest and ours < 0.5 * clipped


def test_descent_lowers_the_error():
    weight, inputs = linear(32, 150)
    feedback = Feedback(inputs.hessian, 1e-6)
    errors, rounded = [], to_grid(weight)
    for _ in range(3):
        errors.append(output_error(weight, rounded, inputs.hessian))
        rounded = feedback.descend(weight, rounded, lambda values, column: to_grid(values))
    assert (errors[1] < errors[0]).all() and (errors[2] <= errors[1] * 1.0001).all()


def test_any_codebook_can_be_rounded_to():
    weight, inputs = linear(24, 48)
    codebook, seen = torch.tensor([-2.0, -0.7, -0.1, 0.2, 0.9, 2.2]), []

    def nearest(values, column):
        seen.append(column)
        return codebook[(values[:, None] - codebook).abs().argmin(1)]

    rounded = Feedback(inputs.hessian).round(weight, nearest)
    assert sorted(seen) == list(range(48)) and torch.isin(rounded, codebook).all()
    plain = nearest(weight.flatten(), 0).view_as(weight)
    assert output_error(weight, rounded, inputs.hessian).sum() < 0.5 * output_error(weight, plain, inputs.hessian).sum()


def test_singular_hessian_raises_the_damping_and_says_so():
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    inputs = SimpleNamespace(hessian=torch.ones(16, 16), count=1)
    with pytest.warns(UserWarning, match="singular: damping raised from 0 to 0.0001"):
        tensors = gptq.quantize(weight, AffineFormat(4, 8, False), inputs, damping=0)
    assert torch.isfinite(tensors["scale"]).all()
    indefinite = torch.eye(16)
    indefinite[0, 1] = indefinite[1, 0] = 3.0
    with pytest.warns(UserWarning, match="damping raised from 0.01 to 10$"):
        Feedback(indefinite)


def test_hessians_that_cannot_be_used_are_refused():
    weight, inputs = linear(4, 16)
    format = AffineFormat(4, 8, False)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        Feedback(-torch.eye(16))
    inputs.hessian[3, 3] = float("nan")
    with pytest.raises(ValueError, match="Hessian of the inputs holds NaN"):
        gptq.quantize(weight, format, inputs)
    for missing in (None, SimpleNamespace(hessian=None)):
        with pytest.raises(ValueError, match="gptq needs the Hessian"):
            gptq.quantize(weight, format, missing)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(bad):
    weight, inputs = linear(4, 16)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match="weight holds NaN or infinite"):
        gptq.quantize(weight, AffineFormat(4, 8, False), inputs)


def test_dead_channels_are_rounded_to_nearest_and_move_nothing():
    weight, inputs = linear(8, 20)
    alive = [k for k in range(20) if k not in (3, 11)]
    hessian = inputs.hessian.clone()
    hessian[[3, 11]] = 0
    hessian[:, [3, 11]] = 0
    rounded = Feedback(hessian).round(weight, lambda values, column: to_grid(values))
    assert torch.equal(rounded[:, [3, 11]], to_grid(weight[:, [3, 11]]))
    damping = 0.01 * 18 / 20  # the mean of the diagonal counts dead channels
    feedback = Feedback(hessian[alive][:, alive], damping)
    without = feedback.round(weight[:, alive], lambda values, column: to_grid(values))
    assert torch.equal(rounded[:, alive], without)


def test_no_input_at_all_rounds_to_nearest():
    weight, _ = linear(8, 20)
    rounded = Feedback(torch.zeros(20, 20)).round(weight, lambda values, column: to_grid(values))
    assert torch.equal(rounded, to_grid(weight))


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_zeros_and_constant_rows(symmetric):
    weight, inputs = linear(6, 24)
    weight[0], weight[1], weight[2], weight[3, 8:16] = 0, 3, -2, 0
    format = AffineFormat(4, 8, symmetric)
    back = format.dequantize(gptq.quantize(weight, format, inputs), 24, torch.float32)
    assert torch.isfinite(back).all() and (back[0] == 0).all() and (back[3, 8:16] == 0).all()
    assert (back[1] - 3).abs().max() < 0.5 and (back[2] + 2).abs().max() < 0.5


def test_pb_llm_quantizes_a_transposed_view_alike():
    weight, inputs = linear(16, 32)
    expected = pb_llm.quantize(weight, PartlyBinaryFormat(), inputs)
    found = pb_llm.quantize(weight.T.contiguous().T, PartlyBinaryFormat(), inputs)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
