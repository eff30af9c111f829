"""What other libraries' checkpoints asked of the formats: zero points in float, minima, scales in another dtype,
another order of inputs. On every layout that computes with them."""

import pytest
import torch
from helpers import assert_close

from hf_efficient import WeightOnlyConfig
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.affine import _ordered
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.kernels.linear import native_cpu
from hf_efficient.kernels.linear.torch_cpu import Int4CpuLayout, Int8CpuLayout
from hf_efficient.kernels.linear.weight_only import FloatZeroTritonLayout
from hf_efficient.layers import EfficientLinear
from hf_efficient.methods import quantize


ROWS, COLUMNS = 48, 160
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
REASON = "scales, zero points and x in this dtype, sums in float32"


def tensors_of(format: AffineFormat) -> dict[str, torch.Tensor]:
    shape = format.shapes(ROWS, COLUMNS)["scale"]
    codes = torch.randint(0, 2**format.bits, (ROWS, COLUMNS), dtype=torch.uint8)
    tensors = {"qweight": format.pack(codes), "scale": torch.rand(shape) * 0.1 + 0.01}
    if format.zero_point == "float":
        tensors["zero_point"] = torch.rand(shape) * 2**format.bits
    else:
        tensors["minimum"] = -torch.rand(shape) * 0.1 * 2**format.bits
    return tensors


@pytest.fixture(params=["compiled", "torch"])
def kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native_cpu, "kernel", lambda bits: None)
    elif native_cpu.kernel(4) is None:
        pytest.skip("no C++ kernels for this CPU")
    return request.param


@pytest.mark.parametrize("zero_point", ["float", "minimum"])
@pytest.mark.parametrize("group_size", [16, 32, 64, -1, None])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_layouts_compute_with_the_dequantized_weight(bits, group_size, zero_point, kernels):
    format = AffineFormat(bits, group_size, False, zero_point=zero_point, scale_dtype="float32")
    tensors = tensors_of(format)
    weight = format.dequantize(tensors, COLUMNS, torch.float32)
    for dtype in TOLERANCE:
        layout = format.layout(tensors, COLUMNS, dtype)
        if kernels == "torch" and group_size in (32, 64):
            assert isinstance(layout, (Int4CpuLayout, Int8CpuLayout))
        for rows in (1, 5, 40):
            x = torch.randn(rows, COLUMNS).to(dtype)
            expected = x.float() @ weight.t()
            largest = expected.abs().max().item() * 0.05
            # torch's operators round scales and zeros, too
            tolerance = TOLERANCE[dtype] * (3 if kernels == "torch" else 1)
            assert_close(layout.matmul(x).float(), expected, tolerance, largest, REASON)
        kept = layout.canonical() if layout.replaces_qweight else tensors["qweight"]
        assert torch.equal(kept, tensors["qweight"])
        assert_close(layout.dequantize().float(), weight, 2e-2, weight.abs().max().item() * 0.02, REASON)


@pytest.mark.parametrize("zero_point", ["float", "minimum"])
@pytest.mark.parametrize("group_size", [32, 64, -1, None])
def test_layout_of_the_triton_kernels(group_size, zero_point):
    """The product around the middle of the grid is the op's (its reference here), what is added to it is tested."""
    format = AffineFormat(4, group_size, False, zero_point=zero_point, scale_dtype="float32")
    tensors = tensors_of(format)
    weight = format.dequantize(tensors, COLUMNS, torch.float32)
    layout = FloatZeroTritonLayout(*_ordered(tensors), 4, group_size, COLUMNS, torch.float32)
    x, bias = torch.randn(2, 3, COLUMNS), torch.randn(ROWS)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert_close(layout.matmul(x, bias), expected, 1e-5, 1e-3, REASON)
    assert_close(layout.dequantize(), weight, 1e-5, 1e-4, REASON)
    assert torch.equal(layout.canonical(), tensors["qweight"])


def test_inputs_rounded_to_int8_with_float_zero_points():
    if native_cpu.kernel(4) is None:
        pytest.skip("no C++ kernels for this CPU")
    format = AffineFormat(4, 32, False, True, "float", "float32")
    tensors = tensors_of(format)
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16)
    expected = x.float() @ format.dequantize(tensors, COLUMNS, torch.float32).t()
    y = format.layout(tensors, COLUMNS, torch.bfloat16).matmul(x).float()
    assert_close(y, expected, 0.02, float("inf"), "inputs in 8 bits")


def test_gradients_reach_the_input_through_every_option():
    inner = AffineFormat(4, 32, False, zero_point="float", scale_dtype="float32")
    format = TransformedFormat(inner, input_order=True)
    tensors = {**tensors_of(inner), "input_order": torch.randperm(COLUMNS).int()}
    layer = EfficientLinear(COLUMNS, ROWS, False, format, torch.bfloat16)
    for name, tensor in tensors.items():
        getattr(layer, name).data = tensor
    weight = layer.dequantized(dtype=torch.float32)
    plain = inner.dequantize(tensors, COLUMNS, torch.float32)
    assert torch.equal(weight[:, tensors["input_order"].long()], plain)
    x = torch.randn(2, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert_close(y.float(), x.float() @ weight.t(), 8e-3, float("inf"), REASON)
    y.sum().backward()
    assert_close(x.grad.float(), weight.sum(0).expand(2, -1), 8e-3, float("inf"), REASON)
    state = layer.to(torch.float16).state_dict()
    assert state["scale"].dtype == torch.float32 and torch.equal(state["input_order"], tensors["input_order"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_keep_their_dtype_and_decide_the_rounding(dtype):
    format = AffineFormat(4, 32, True, scale_dtype="float16")
    codes, scale = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8), torch.rand(ROWS, 5).half() / 8
    tensors = {"qweight": format.pack(codes), "scale": scale}
    assert format.dtypes(dtype)["scale"] == torch.float16
    expected = ((codes.half() - 8) * scale.repeat_interleave(32, 1)).to(dtype)
    assert torch.equal(format.dequantize(tensors, COLUMNS, dtype), expected)


@pytest.mark.parametrize("options", [dict(zero_point="minimum"), dict(scale_dtype="float32"), dict(input_order=True)])
def test_no_method_chooses_them(options):
    with pytest.raises(ValueError, match="is read from checkpoints of other libraries"):
        quantize(torch.randn(8, 64), WeightOnlyConfig(**options).format(), "hqq")


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_only_hqq_chooses_zero_points_in_float(method):
    with pytest.raises(ValueError, match=f"method='{method}' chooses integers"):
        quantize(torch.randn(8, 64), AffineFormat(4, 32, False, zero_point="float"), method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4])
def test_hqq_errs_less_with_zero_points_in_float(bits, dtype):
    weight = torch.randn(64, 256).to(dtype)
    errors = {}
    for kind in ("integer", "float"):
        format = AffineFormat(bits, 64, False, zero_point=kind)
        tensors = quantize(weight, format, "hqq")
        assert {name: tensor.dtype for name, tensor in tensors.items()} == format.dtypes(dtype)
        found = format.dequantize(tensors, 256, torch.float32)
        errors[kind] = (found - weight.float()).abs().pow(0.7).mean().item()
    assert errors["float"] < 0.97 * errors["integer"]  # 0.953 to 0.961 of it


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(zero_point="real"), "zero_point='real' is not supported: it must be one of"),
        (dict(zero_point="float", symmetric=True), "zero_point='float' is not supported"),
        (dict(zero_point="minimum", codebook="nf4"), "zero_point='minimum' is not supported"),
        (dict(scale_dtype="float64"), "scale_dtype='float64' is not supported"),
        (dict(input_order=1), "input_order=1 is not supported"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WeightOnlyConfig(**options)
