"""BiLLM, DB-LLM and PB-LLM: what their formats mean, and what the methods find, against the papers."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from format_checks import check_declared, check_on_a_gpu
from helpers import assert_close, assert_same_tensors
from torch import nn

from hf_efficient import methods
from hf_efficient.calibration.refine_binary import TwoBitWeight
from hf_efficient.compression.recovery.coded_weights import coded_weight
from hf_efficient.formats.binary import DualBinaryFormat, PartlyBinaryFormat, SplitBinaryFormat, of_method
from hf_efficient.kernels.linear.layout import RestoredLayout
from hf_efficient.kernels.linear.native_binary import NativeBinaryLayout
from hf_efficient.methods._error_feedback import output_error
from hf_efficient.methods.billm import split_magnitudes
from hf_efficient.methods.db_llm import dual_factors


GROUPS = {"billm": 32, "db_llm": 32, "pb_llm": -1}
COLUMNS = 80  # with a short last group


def case(rows=48):
    """(a weight, the Hessian of inputs that depend on each other)"""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(512, 24, generator=generator) @ torch.randn(24, COLUMNS, generator=generator)
    x = (mixed + torch.randn(512, COLUMNS, generator=generator)) * torch.rand(COLUMNS, generator=generator)
    return torch.randn(rows, COLUMNS, generator=generator), x.t() @ x


def made(method, dtype=torch.float32, hessian=None):
    weight, own = case()
    format = of_method(method, GROUPS[method])
    inputs = SimpleNamespace(hessian=own if hessian is None else hessian)
    return format, methods.quantize(weight.to(dtype), format, method, inputs)


def bit(packed, index: int) -> int:
    return int(packed.flatten()[index // 8]) >> index % 8 & 1


@pytest.mark.parametrize("method", GROUPS)
def test_the_definition(method):
    format, tensors = made(method)
    weight = format.dequantize(tensors, COLUMNS, torch.float64)
    signs = values = 0
    for row, column in itertools.product(range(48), range(COLUMNS)):
        if method == "pb_llm":
            if bit(tensors["bitmap"][row], column):
                integer, values = int(tensors["values"][values]), values + 1
            else:
                integer = int(tensors["magnitude"][row]) * (1 - 2 * bit(tensors["qweight"], signs))
                signs += 1
        else:
            low, high = (bit(tensors["qweight"][row], 2 * column + place) for place in (0, 1))
            factors = tensors["factors"][row].view(format.KINDS, -1)[:, column // 32].tolist()
            if method == "billm":
                first = 0 if bit(tensors["salient"], column) else 2
                integer = factors[first + high] * (1 - 2 * low)
            else:
                integer = factors[0] * low + factors[1] * high
        assert weight[row, column].item() == integer * tensors["scale"][row].item()


@pytest.mark.parametrize("method", GROUPS)
def test_a_weight_in_the_format(method):
    format, tensors = made(method, torch.bfloat16)
    check_declared(format, tensors, 48, COLUMNS)
    format.check(tensors, COLUMNS)
    layout, x = format.layout(tensors, COLUMNS, torch.bfloat16), torch.randn(3, COLUMNS).bfloat16()
    dense = format.dequantize(tensors, COLUMNS, torch.float64)
    assert_close(layout.matmul(x), x.double() @ dense.t(), 0.01, 0.2, "bfloat16 results")
    assert type(layout) is (RestoredLayout if method == "pb_llm" else NativeBinaryLayout)
    kept = set(tensors) - set(layout.replaced)
    own = {"magnitude", "bitmap"} if method == "pb_llm" else set(tensors) - {"qweight"}
    assert kept == own, "what the layout gives back does not lie in memory twice"
    for name, restore in layout.replaced.items():
        assert torch.equal(restore(), tensors[name])
    for name, bad in (("factors", -128), ("values", -128), ("magnitude", -1), ("bitmap", 0)):
        if name in tensors:
            with pytest.raises(ValueError, match=name):
                format.check({**tensors, name: torch.full_like(tensors[name], bad)}, COLUMNS)


@pytest.mark.parametrize("method", GROUPS)
def test_training_keeps_the_codes(method):
    format, tensors = made(method)
    coded = coded_weight(format, tensors, COLUMNS, torch.float32)
    torch.testing.assert_close(coded(torch.float32), format.dequantize(tensors, COLUMNS, torch.float32))
    coded.log_scale.data += 0.5
    expected = {**tensors, "scale": tensors["scale"] * math.exp(0.5)}
    torch.testing.assert_close(coded.canonical(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", GROUPS)
def test_on_a_gpu(method):
    format, tensors = made(method, torch.bfloat16)
    check_on_a_gpu(format, tensors, COLUMNS, RestoredLayout, 0.01)


def test_bits_of_a_weight():
    assert SplitBinaryFormat(128).bits_per_weight(576, 1536, torch.bfloat16) == 2 + 4 * 8 / 128 + 16 / 1536 + 1 / 576
    assert DualBinaryFormat(64).bits_per_weight(576, 1536, torch.bfloat16) == 2 + 2 * 8 / 64 + 16 / 1536
    partly = PartlyBinaryFormat().bits_per_weight(576, 1536, torch.bfloat16)
    assert partly == pytest.approx(1 + 0.9 + 0.1 * 8 + 24 / 1536, abs=1e-4)


@pytest.mark.parametrize("method", GROUPS)
def test_feedback_lowers_the_output_error(method):
    weight, hessian = case()
    format, fed_back = made(method)
    plain = made(method, hessian=hessian.diagonal().diag())[1]
    errors = [
        output_error(weight, format.dequantize(t, COLUMNS, torch.float32), hessian).sum() for t in (fed_back, plain)
    ]
    assert errors[0] < 0.7 * errors[1]


def test_billm_splits_where_the_error_is_least():
    magnitudes, importance = torch.randn(20, 24).abs(), torch.rand(24)
    low, high, error = split_magnitudes(magnitudes, importance, tuple(i / 50 for i in range(1, 200)))
    number = torch.where(magnitudes > (low + high)[:, None] / 2, high[:, None], low[:, None])
    for row in range(20):
        values, order = magnitudes[row].double().sort()
        weights, best = importance[order].double(), float("inf")
        for cut in range(25):
            parts = [(values[part], weights[part]) for part in (slice(0, cut), slice(cut, 24)) if len(values[part])]
            centres = [(v * w).sum() / w.sum() for v, w in parts]
            best = min(best, sum((w * (v - c) ** 2).sum().item() for (v, w), c in zip(parts, centres)))
        assert best * 0.999 <= error[row] <= best * 1.02
        assert (importance * (magnitudes - number).square())[row].sum() <= error[row] * 1.001
    # the paper's two binary terms of a salient column are no better than the split at the mean
    first = magnitudes.mean(1, keepdim=True)
    second = (magnitudes - first).abs().mean(1, keepdim=True)
    residual = (magnitudes - first - second * (magnitudes - first).sign()).square().sum(1)
    assert (split_magnitudes(magnitudes, torch.ones(24), (1.0,))[2] <= residual * 1.0001).all()


def test_billm_marks_the_columns_of_large_inputs():
    weight, hessian = case()
    scale = torch.ones(COLUMNS)
    scale[[3, 40]] = 30
    format, tensors = made("billm", hessian=hessian * scale * scale[:, None])
    assert bit(tensors["salient"], 3) and bit(tensors["salient"], 40)
    assert sum(bit(tensors["salient"], column) for column in range(COLUMNS)) < COLUMNS // 2


def test_db_llm_is_no_worse_than_the_grid_it_begins_with():
    weight, importance = case()[0].float(), torch.rand(COLUMNS) + 0.1
    factors = dual_factors(weight, importance)
    assert (factors[:, 0] * factors[:, 1] < 0).all()
    first, second = factors.T[..., None]
    table = torch.stack([0 * first, first, second, first + second], -1)
    error = (weight[..., None] - table).square().amin(-1) @ importance
    grids = []
    for share in (0.3, 0.5, 0.7, 1.0):
        step = share * weight.abs().amax(1, keepdim=True) / 2
        grids += [
            ((weight - (weight / step * s).round().clamp(-1, 2) * step * s).square() @ importance) for s in (1, -1)
        ]
    assert (error <= torch.stack(grids).amin(0) * 1.001).all()


def test_pb_llm_keeps_the_salient_tenth_in_8_bits():
    weight, hessian = case()
    format, tensors = made("pb_llm", hessian=torch.eye(COLUMNS))
    error = (format.dequantize(tensors, COLUMNS, torch.float32) - weight).abs()
    salient = error < weight.abs().amax(1, keepdim=True) * 0.02
    assert salient.float()[weight.abs() > weight.abs().flatten().quantile(0.91)].mean() > 0.95


@pytest.mark.parametrize("method", GROUPS)
@pytest.mark.parametrize("power", [120, -90])
def test_weights_whose_squares_overflow_or_vanish_get_the_same_codes(method, power):
    weight, hessian = case()
    format, expected = made(method)
    inputs = SimpleNamespace(hessian=hessian)
    tensors = methods.quantize(weight * 2.0**power, format, method, inputs)
    scale = tensors.pop("scale")
    assert torch.equal(scale, expected.pop("scale") * 2.0**power)
    assert_same_tensors(tensors, expected)


@pytest.mark.parametrize("method", ["billm", "db_llm"])
def test_refinement_begins_with_the_codes_and_has_gradients(method):
    weight, _ = case()
    format, tensors = made(method)
    module = nn.Linear(COLUMNS, 48, bias=False)
    module.weight.data.copy_(weight)
    tuned = TwoBitWeight(module, format, tensors)
    assert torch.equal(tuned.tensors()["qweight"], tensors["qweight"])
    torch.testing.assert_close(tuned(), format.dequantize(tensors, COLUMNS, torch.float32))
    target, before = torch.randn(48, COLUMNS), None
    optimizer = torch.optim.Adam(tuned.groups())
    for _ in range(20):
        loss = (tuned() - target).square().mean()
        before = before or loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = (format.dequantize(tuned.tensors(), COLUMNS, torch.float32) - target).square().mean()
    assert after < before and not torch.equal(tuned.tensors()["factors"], tensors["factors"])
