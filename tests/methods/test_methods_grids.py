"""Methods that only choose a grid: rtn, mse, hqq."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_efficient import WeightOnlyConfig
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.group_bits import GroupBitsFormat
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.formats.w8a8 import Float8Format, Int8Format
from hf_efficient.layers import compress_linear
from hf_efficient.methods import hqq, mse, quantize, rtn
from hf_efficient.methods._affine_grid import covering_grid, decode, round_to
from hf_efficient.observers.linear_inputs import LinearInputs


def random_weight(rows: int, columns: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Heavy tails, rows of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, rows, columns, generator=generator)
    return (first * (0.2 + second**2) * torch.rand(rows, 1, generator=generator)).to(dtype)


def change(method, weight, format, inputs=None) -> torch.Tensor:
    """w - q by group, float64 [N, G, width], zeros where a short last group is padded ([1, 1, N * K] for a tensor)."""
    back = format.dequantize(method.quantize(weight, format, inputs), weight.shape[1], torch.float32)
    error = weight.double() - back.double()
    if format.group_size is None:
        return error.view(1, 1, -1)
    width = weight.shape[1] if format.group_size == -1 else format.group_size
    return torch.nn.functional.pad(error, (0, -weight.shape[1] % width)).unflatten(1, (-1, width))


SHAPES = st.sampled_from([2, 3, 4, 8]), st.sampled_from([8, 12, -1, None])
FORMATS = st.builds(AffineFormat, *SHAPES, st.sampled_from([True, False]))
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 10**6))


@settings(max_examples=40, deadline=None)
@given(FORMATS, SIZES)
def test_mse_never_errs_more_than_rtn_in_any_group(format, size):
    weight = random_weight(*size)
    ours, nearest = (change(method, weight, format).square().sum(-1) for method in (mse, rtn))
    assert (ours <= nearest * (1 + 1e-5)).all()  # compared in float32


@settings(max_examples=40, deadline=None)
@given(FORMATS, SIZES)
def test_mse_weighs_columns_by_their_inputs(format, size):
    weight = random_weight(*size)
    inputs = SimpleNamespace(mean_square=torch.rand(size[1], generator=torch.Generator().manual_seed(size[2])) ** 4)
    root = inputs.mean_square.double().sqrt()
    weighted = []
    for method in (mse, rtn):
        back = format.dequantize(method.quantize(weight, format, inputs), size[1], torch.float32)
        weighted.append(((weight.double() - back.double()) * root).square().sum())
    assert weighted[0] <= weighted[1] * (1 + 1e-5)


@settings(max_examples=30, deadline=None)
@given(st.builds(AffineFormat, *SHAPES, st.just(False)), SIZES)
def test_hqq_never_errs_more_than_rtn_in_its_own_objective(format, size):
    weight = random_weight(*size)
    ours, nearest = (change(method, weight, format).abs().pow(0.7).sum(-1) for method in (hqq, rtn))
    # |e|^0.7 of an error that is 0 but for float32 rounding is 1e-5
    assert (ours <= nearest * (1 + 1e-5) + 1e-4).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("zero_point", ["integer", "float"])
def test_hqq_is_the_half_quadratic_iteration(bits, zero_point):
    """Group by group, in float64: shrinkage of the error, then the zero point of least squares for the rest."""
    weight, format = random_weight(12, 32), AffineFormat(bits, 16, False, zero_point=zero_point)
    tensors, levels = hqq.quantize(weight, format), 2**bits - 1
    scales, zeros = tensors["scale"].double(), tensors["zero_point"].double()
    assert torch.equal(tensors["scale"], covering_grid(weight, format)[0])
    moved = 0

    def restored(values, scale, zero):
        return scale * ((values / scale + zero).round().clamp(0, levels) - zero)

    for row, group in itertools.product(range(12), range(2)):
        values, scale = weight[row, 16 * group : 16 * group + 16].double(), scales[row, group]
        start = zero = (-values.min().clamp_max(0) / scale).round()
        found = [zero]
        for round_ in range(20):
            error = values - restored(values, scale, zero)
            shrunk = error.abs() - error.abs().clamp_min(1e-8) ** -0.3 / (10 * 1.01**round_)
            split = error.sign() * shrunk.clamp_min(0)
            codes = (values / scale + zero).round().clamp(0, levels)
            zero = (codes - (values - split) / scale).mean()
            found += [zero] if zero_point == "float" else [zero.floor().clamp(0, levels), zero.ceil().clamp(0, levels)]
        best = min(((values - restored(values, scale, each)).abs() ** 0.7).sum() for each in found)
        own = ((values - restored(values, scale, zeros[row, group])).abs() ** 0.7).sum()
        assert own <= best * (1 + 1e-3), "float32, where a tie may round otherwise"
        moved += zeros[row, group] != start
    assert moved >= 6 or zero_point == "integer", "integers hardly move"


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_rotated_weights_need_no_hessian(method):
    weight, inputs = random_weight(16, 64), LinearInputs(64, hessian=False)
    inputs.update(torch.randn(100, 64, generator=torch.Generator().manual_seed(1)))
    format = TransformedFormat(AffineFormat(4, 32, False), rotation=True)
    expected = quantize(weight, format, method)
    found = quantize(weight, format, method, inputs)
    assert_close(found["scale"], expected["scale"], 1e-3, 1e-2, "all columns weigh the same, up to rounding")


@pytest.mark.parametrize("side", [1, -1])
def test_hqq_spends_no_codes_between_zero_and_weights_of_one_sign(side):
    """A float zero point need not be a code: the error is that of the same weights around 0."""
    format, middle = AffineFormat(4, 32, False, zero_point="float"), random_weight(16, 64).clamp(-2, 2)
    errors = [change(hqq, weight, format).abs().mean() for weight in (middle, middle + 6 * side)]
    assert errors[1] < 1.05 * errors[0]


def test_hqq_in_8_bits_has_zero_points_unless_asked_otherwise():
    overrides = WeightOnlyConfig(method="hqq", overrides={"*down_proj": {"bits": 8}})
    for config in (WeightOnlyConfig(method="hqq", bits=8), overrides.for_module("mlp.down_proj")):
        assert (config.symmetric, config.group_size, config.zero_point) == (False, -1, "integer")
    with pytest.raises(ValueError, match="symmetric=True"):
        WeightOnlyConfig(method="hqq", bits=8, symmetric=True)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_answer_zero_for_any_number_of_rows(dtype, symmetric):
    linear = torch.nn.Linear(2048, 32, bias=False).to(dtype).requires_grad_(False)
    linear.weight[::2] = 0
    for group_size in (-1, 64, None):
        if group_size is None:
            linear.weight.zero_()
        format = AffineFormat(8, group_size, symmetric)
        tensors = rtn.quantize(linear.weight, format)
        assert (tensors["scale"].half() > 0).all(), "exports store scales in float16"
        quantized = compress_linear(linear, format, tensors)
        assert (quantized.dequantized("", dtype)[::2] == 0).all()
        for rows in range(1, 14):
            x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(rows)).to(dtype)
            assert quantized(x)[:, ::2].abs().max() < 1e-6, "outputs of the others are about 0.5"


ZERO_GROUPS = [
    *((AffineFormat(4, 16, True), method) for method in ("rtn", "mse", "awq", "gptq", "yaqa")),
    *((AffineFormat(3, 16, False), method) for method in ("rtn", "mse", "hqq", "awq", "gptq", "yaqa")),
    (AffineFormat(4, 16, False, zero_point="float"), "hqq"),
    *((CodebookFormat(table, 4, 16), method) for table in ("nf4", "fp4") for method in ("rtn", "gptq")),
    *((CodebookFormat(table, 4, size), "rtn") for table, size in (("mxfp4", 32), ("nvfp4", 16))),
    *((CodebookFormat("kmeans", 3, size), method) for size in (16, -1) for method in ("kmeans", "gptq")),
    (GroupBitsFormat(2, 16), "slim_llm"),
    (TrellisFormat(2), "rtn"),
    *((Int8Format(zero_point=zero_point), "_w8a8_weights") for zero_point in (False, True)),
    (Float8Format(), "_w8a8_weights"),
]


@pytest.mark.parametrize("format, method", ZERO_GROUPS, ids=[f"{method}-{own}" for own, method in ZERO_GROUPS])
def test_groups_of_zeros_are_zeros_in_every_scheme(format, method):
    inputs = LinearInputs(64)
    inputs.update(torch.randn(100, 64, generator=torch.Generator().manual_seed(1)))
    inputs.output_hessian = torch.eye(32)
    weight = random_weight(32, 64)
    weight[3] = weight[5, 32:] = 0
    tensors = quantize(weight, format, method, inputs)
    assert (format.dequantize(tensors, 64, torch.float32)[3] == 0).all()
    if getattr(format, "group_size", -1) != -1:
        assert (format.dequantize(tensors, 64, torch.float32)[5, 32:] == 0).all()
        assert "scale" not in tensors or (tensors["scale"][3] < 1e-4).all(), "kernels multiply what rounding leaves"


def test_hqq_refuses_a_symmetric_format():
    with pytest.raises(ValueError, match="method='hqq' chooses zero points"):
        hqq.quantize(torch.ones(4, 8), AffineFormat(4, 8, True))


@pytest.mark.parametrize("bits, symmetric", [(2, True), (2, False), (3, False), (4, True), (4, False)])
def test_mse_is_near_the_best_of_all_grids(bits, symmetric):
    weight, format = random_weight(24, 32), AffineFormat(bits, 32, symmetric)
    full, _ = covering_grid(weight, format)
    best = torch.full((24, 1), torch.inf)
    zeros = [format.levels / 2 + 0.5] if symmetric else range(format.levels + 1)
    for shrink, zero in itertools.product(torch.arange(0.2, 1.2, 0.01), zeros):
        grid = full * shrink, torch.full_like(full, zero)
        error = (decode(round_to(weight, *grid, format), *grid, format) - weight).square().sum(1, keepdim=True)
        best = torch.minimum(best, error)
    ours = change(mse, weight, format).square().sum(-1)
    assert ours.sum() < 1.03 * best.sum()
    assert ours.sum() < 0.96 * change(rtn, weight, format).square().sum()


METHODS = pytest.mark.parametrize("method", [rtn, mse, hqq], ids=["rtn", "mse", "hqq"])


@METHODS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits, group, symmetric", [(2, 64, False), (3, 128, True), (4, -1, False), (8, None, False)])
def test_tensors_are_the_formats(method, bits, group, symmetric, dtype):
    symmetric = symmetric and method is not hqq
    weight, format = random_weight(5, 144, dtype=dtype), AffineFormat(bits, group, symmetric)  # a short last group
    tensors = method.quantize(weight, format)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == format.shapes(5, 144)
    assert {name: t.dtype for name, t in tensors.items()} == format.dtypes(dtype)
    codes, zero = format.unpack(tensors["qweight"], 144), tensors.get("zero_point")
    zero = torch.full_like(tensors["scale"], 2 ** (bits - 1), dtype=torch.float32) if zero is None else zero.float()
    assert torch.equal(codes, round_to(weight, tensors["scale"], zero, format))
    decoded = decode(codes, tensors["scale"], zero, format)
    assert_close(decoded, format.dequantize(tensors, 144, torch.float32), 1e-6, 1e-6, "float32 arithmetic")


@METHODS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("group", [8, None])
def test_weights_that_are_not_finite_are_refused(method, bad, group):
    weight = random_weight(4, 20)
    weight[2, 19] = bad
    with pytest.raises(ValueError, match="weight holds NaN or infinite"):
        method.quantize(weight, AffineFormat(4, group, False))


def test_weights_that_overflow_in_the_format_are_refused():
    weight = torch.full((4, 64), 65504.0, dtype=torch.float16)  # a third of it is rounded up
    with pytest.raises(ValueError, match=r"method='rtn': weights of up to 6.55e\+04 overflow torch.float16 in Affine"):
        quantize(weight, AffineFormat(2, 32, False), "rtn")


@METHODS
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_zeros_and_constant_rows(method, symmetric):
    weight, format = random_weight(4, 24), AffineFormat(4, 8, symmetric and method is not hqq)
    weight[0], weight[1], weight[2], weight[3, 8:16] = 0, 3, -2, 0
    tensors = method.quantize(weight, format)
    back = format.dequantize(tensors, 24, torch.float32)
    assert torch.isfinite(back).all() and (tensors["scale"] > 0).all()
    assert (back[0] == 0).all() and (back[3, 8:16] == 0).all()
    assert (back[1] - 3).abs().max() < 0.25 and (back[2] + 2).abs().max() < 0.15


@pytest.mark.parametrize("method", [mse, hqq], ids=["mse", "hqq"])
def test_large_weights_are_taken_in_pieces(method, monkeypatch):
    weight, format = random_weight(50, 40), AffineFormat(4, 16, False)
    whole = change(method, weight, format).square().sum()
    monkeypatch.setattr(method, "_ELEMENTS_AT_ONCE", 40 * 7)
    pieces = change(method, weight, format).square().sum()
    # sums over a group are ordered by the shape of the piece, which decides between candidates of equal error
    assert abs(pieces / whole - 1) < 1e-3
