"""The ops of `kernels.linear.w8a8` on a CPU: against the kernels' reference, gradients, torch.compile."""

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels.efficient_linear import activation_reference
from hf_efficient.kernels.linear import w8a8
from hf_efficient.kernels.linear.w8a8_layouts import int8_layout


FORMATS = w8a8.FORMATS
OPS = torch.ops.hf_efficient
# the output's rounding, 2^-9 in bfloat16; dequantized float8 operands are rounded to it too (2^-9 each, independent)
BFLOAT16 = (2**-8, 2**-6, "operands and output are rounded to bfloat16")
FLOAT32 = (1e-6, 1e-5, "float32 all the way")


def weight_codes(format, out_features, in_features):
    """(codes, scale) of a random weight; the scale is of the kind that goes with the format of x."""
    weight = torch.randn(out_features, in_features)
    if format == "fp8_block":
        scale = torch.rand(-(-out_features // 128), -(-in_features // 128)) * 0.01 + 0.01
        weight = weight / activation_reference.expand_scale(scale, out_features, in_features)
        return weight.clamp(-448, 448).to(torch.float8_e4m3fn), scale
    codes, scale, _ = activation_reference.quantize_reference(weight, "fp8" if format == "fp8" else "int8")
    return codes, scale


def static(format):
    if format in ("int8", "fp8"):
        return {"scale": torch.tensor([[0.02]])}
    return {"scale": torch.tensor(0.02), "zero_point": torch.tensor([[7]], dtype=torch.int8)}


def exact_product(x, codes, scale, bias):
    """Quantized rows times the weight in float64."""
    w = activation_reference.dequantize_codes(codes, scale).double()
    y = activation_reference.dequantize_codes(*x).double() @ w.t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_reference(format, dtype):
    x = torch.randn(5, 333).to(dtype) * torch.tensor([1e-30, 0, 1, 100, 1e30])[:, None].to(dtype)
    for arguments in ({}, static(format)) if format != "fp8_block" else ({},):
        actual = w8a8.quantize(x, format, **arguments)
        expected = activation_reference.quantize_reference(x, format, **arguments)
        for name, one, other in zip(actual._fields, actual, expected):
            assert (one is None) == (other is None) or arguments, name
            if other is not None and not (arguments and name != "codes"):
                assert torch.equal(one.float(), other.float()), name


@pytest.mark.parametrize("format", FORMATS)
def test_fused_quantization_is_that_of_the_fused_operation(format):
    x, y, weight = torch.randn(4, 200), torch.randn(4, 200), torch.rand(200) + 0.5
    quantized, total, rows = w8a8.rms_norm_quantize(x, weight, 1e-6, y, format=format, normalised=True)
    assert torch.equal(total, x + y)
    assert_close(rows, activation_reference.rms_norm_reference(x, weight, 1e-6, y)[1], *FLOAT32)
    assert torch.equal(quantized.codes.float(), w8a8.quantize(rows, format).codes.float())
    quantized, total, rows = w8a8.rms_norm_quantize(x, weight, 1e-6, format=format)
    assert total is None and rows is None
    silu = w8a8.silu_mul_quantize(x, y, format=format)
    expected = w8a8.quantize(torch.nn.functional.silu(x) * y, format)
    assert torch.equal(silu.codes.float(), expected.codes.float())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows, out_features, in_features", [(1, 48, 64), (3, 37, 301), (130, 140, 130), (5, 37, 1)])
def test_product(format, rows, out_features, in_features):
    x = torch.randn(rows, in_features)
    codes, scale = weight_codes(format, out_features, in_features)
    bias = torch.randn(out_features) if rows != 3 else None
    expected = exact_product(w8a8.quantize(x, format), codes, scale, bias)
    actual = w8a8.quantized_linear(x, codes, scale, bias, format=format)
    assert_close(actual, expected, *FLOAT32[:1], 1e-5 * expected.abs().max().item(), FLOAT32[2])
    actual = w8a8.multiply(w8a8.quantize(x, format), codes, scale, bias, out_dtype=torch.bfloat16)
    assert_close(actual, expected, BFLOAT16[0], BFLOAT16[1] * expected.abs().max().item(), BFLOAT16[2])


def test_zero_points_of_both_operands():
    x = w8a8.quantize(torch.randn(5, 301) + 1, "int8_asymmetric")
    codes = torch.randint(-128, 128, (37, 301), dtype=torch.int8)
    zero, scale = torch.randint(-128, 128, (37, 1), dtype=torch.int8), torch.rand(37, 1)
    expected = activation_reference.w8a8_linear_reference(
        x.codes, codes, x.scale, scale, x_zero_point=x.zero_point, w_zero_point=zero
    )
    for sums in (None, codes.sum(1, dtype=torch.int32)):
        actual = w8a8.multiply(x, codes, scale, w_zero_point=zero, w_sums=sums, out_dtype=torch.float32)
        assert_close(actual, expected, 1e-6, 1e-5 * expected.abs().max().item(), "int32 sums are exact")


def test_sums_that_may_exceed_int32_are_refused():
    """As on a GPU, when a layer derives what it multiplies."""
    for format, zero_point, most in (("int8", None, 131071), ("int8_asymmetric", None, 65793), ("int8", 0, 65793)):
        tensors = {"qweight": torch.full((1, most), 127, dtype=torch.int8), "scale": torch.ones(1, 1)}
        if zero_point is not None:
            tensors["zero_point"] = torch.full((1, 1), zero_point, dtype=torch.int8)
        layout = int8_layout(tensors, torch.float32, format, None)
        assert layout.matmul(torch.ones(1, most)).item() == pytest.approx(127 * most)
        tensors["qweight"] = torch.full((1, most + 1), 127, dtype=torch.int8)
        with pytest.raises(ValueError, match=f"K = {most + 1}: allowed is at most {most}, or the sum overflows int32"):
            int8_layout(tensors, torch.float32, format, None)
    codes = torch.full((1, 131072), 127, dtype=torch.int8)
    with pytest.raises(ValueError, match="K = 131072: allowed is at most 131071"):
        w8a8.multiply(w8a8.Quantized(codes, torch.ones(1, 1)), codes, torch.ones(1), out_dtype=torch.float32)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="pack_int8 changes nothing without VNNI")
@pytest.mark.parametrize("format", FORMATS[:2])
def test_packed_codes(format):
    codes, scale = weight_codes("int8", 37, 301)
    codes[0], codes[1] = 127, -128
    packed, sums = w8a8.pack_int8(codes), codes.sum(1, dtype=torch.int32)
    assert packed.is_mkldnn and torch.equal(w8a8.unpack_int8(packed), codes)
    for rows in (1, 5, 130):
        x = torch.randn(rows, 301, requires_grad=True)
        expected = w8a8.quantized_linear(x, codes, scale, format=format)
        for arguments in ({}, {"w_sums": sums}):
            actual = w8a8.quantized_linear(x, packed, scale, format=format, **arguments)
            assert_close(actual, expected, *FLOAT32[:1], 1e-5 * expected.abs().max().item(), FLOAT32[2])
    grad = torch.autograd.grad(actual.sum(), x)[0]
    assert_close(grad, torch.autograd.grad(expected.sum(), x)[0], *FLOAT32)
    compiled = torch.compile(
        lambda x: w8a8.quantized_linear(x, packed, scale, format=format, w_sums=sums),
        fullgraph=True,
        backend="aot_eager",
    )
    y = compiled(x)
    assert torch.equal(y, actual) and torch.equal(torch.autograd.grad(y.sum(), x)[0], grad)


def test_outlier_columns_are_not_rounded():
    x = torch.randn(6, 301).clamp(-5, 5)
    x[:, 17], x[2, 200] = 40.0, -6.0
    codes, scale = weight_codes("int8", 37, 301)
    expected = activation_reference.llm_int8_reference(x, codes, scale)
    actual = w8a8.llm_int8_linear(x.view(2, 3, 301), codes, scale).view(6, 37)
    assert_close(actual, expected, 1e-6, 1e-5 * expected.abs().max().item(), "float32 sums")
    unrounded = x.double() @ activation_reference.dequantize_codes(codes, scale).double().t()
    rounded = w8a8.quantized_linear(x, codes, scale, format="int8")
    assert (actual - unrounded).norm() < 0.5 * (rounded - unrounded).norm(), "what the decomposition is for"
    without = w8a8.llm_int8_linear(x.clamp(-5, 5), codes, scale)
    assert torch.equal(without, w8a8.quantized_linear(x.clamp(-5, 5), codes, scale, format="int8"))


def linears(format, codes, scale):
    """The differentiable linear of a format: a function of x and bias."""
    if format == "llm_int8":
        return lambda x, bias: w8a8.llm_int8_linear(x, codes, scale, bias)
    return lambda x, bias: w8a8.quantized_linear(x, codes, scale, bias, format=format)


@pytest.mark.parametrize("format", [*FORMATS, "llm_int8"])
def test_gradients_go_straight_through_the_rounding(format):
    codes, scale = weight_codes("int8" if format == "llm_int8" else format, 37, 150)
    weight = activation_reference.dequantize_codes(codes, scale)
    x, bias = torch.randn(2, 3, 150, requires_grad=True), torch.randn(37, requires_grad=True)
    grad = torch.randn(2, 3, 37)
    linears(format, codes, scale)(x, bias).backward(grad)
    assert_close(x.grad, grad @ weight, 1e-6, 1e-4, "float32 products in another order")
    assert_close(bias.grad, grad.sum((0, 1)), 1e-6, 1e-5, "float32 sums in another order")


def test_frozen_weights_and_codes_without_gradient():
    codes, scale = weight_codes("int8", 37, 150)
    x = torch.randn(3, 150, requires_grad=True)
    with pytest.raises(RuntimeError, match="w_scale requires grad"):
        w8a8.quantized_linear(x, codes, scale.clone().requires_grad_(), format="int8").sum().backward()
    with pytest.raises(RuntimeError, match="codes have no gradient"):
        w8a8.quantize(x, "int8")
    with torch.no_grad():
        w8a8.quantize(x, "int8")
    for call in (w8a8.quantize, lambda x, f: w8a8.quantized_linear(x, codes, scale, format=f)):
        with pytest.raises(ValueError, match="format='int4'"):
            call(x.detach(), "int4")


def samples():
    x, weight = torch.randn(3, 150), torch.rand(150)
    for format in ("int8_asymmetric", "fp8_block"):
        codes, scale = weight_codes(format, 37, 150)
        rows = w8a8.quantize(x, format)
        yield OPS.quantize_activation, (x, format, None, None)
        yield OPS.rms_norm_quantize, (x, weight, x, 1e-6, format, None, None, True)
        yield OPS.silu_mul_quantize, (x, x, format, None, None)
        yield OPS.quantized_linear, (x.clone().requires_grad_(), codes, scale, None, format, None, None, None, None)
    yield OPS.fp8_linear, (rows.codes, codes, rows.scale, scale, None, torch.bfloat16)
    codes, scale = weight_codes("int8", 37, 150)
    rows = w8a8.quantize(x, "int8_asymmetric")
    yield OPS.w8a8_linear, (rows.codes, codes, rows.scale, scale, None, rows.zero_point, None, None, torch.bfloat16)
    yield OPS.quantize_activation, (x, "int8_asymmetric", torch.ones(1), torch.zeros(1, dtype=torch.int8))
    yield OPS.dequantize_codes, (codes, scale, None, torch.float16, 150)
    yield OPS.llm_int8_linear, (x.clone().requires_grad_(), codes, scale, torch.randn(37), 2.0)


def test_opcheck():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in samples():
        float8 = any(getattr(argument, "dtype", None) == torch.float8_e4m3fn for argument in arguments)
        # torch's test_schema multiplies the inputs, which float8 tensors cannot
        torch.library.opcheck(op.default, arguments, test_utils=checks[float8:])


def test_compiles_whole_and_gives_the_same():
    x, weight = torch.randn(3, 150), torch.rand(150)
    int8, fp8 = weight_codes("int8", 150, 150), weight_codes("fp8_block", 37, 150)

    def block(x):
        rows, total, _ = w8a8.rms_norm_quantize(x, weight, 1e-6, x, format="int8_asymmetric")
        y = w8a8.multiply(rows, *int8, out_dtype=torch.float32)
        y = w8a8.llm_int8_linear(y + total, *int8, threshold=3.0)
        return w8a8.quantized_linear(y, *fp8, format="fp8_block")

    with torch.no_grad():
        assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))


def test_trains_under_compile():
    codes, scale = weight_codes("int8", 37, 150)
    grads = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-1, 1, 450).view(3, 150).requires_grad_()
        wrap(linears("int8", codes, scale))(x, None).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
