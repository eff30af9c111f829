"""Several products in one launch, and the sum with its norm, against their references: natively on CUDA, through the
Triton interpreter elsewhere."""

import pytest
import torch
from linear_checks import TOLERANCES, check, check_errors, random_weight

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import split_k


SIZES = (33, 70, 20)


@pytest.fixture(autouse=True)
def processors(request, monkeypatch):
    """K is split where two weights are joined, on 64 multiprocessors, and whole where three are, on one."""
    count = getattr(request.node, "callspec", None) and request.node.callspec.params.get("count")
    monkeypatch.setattr(split_k, "processors", lambda device: 1 if count == 3 else 64)


@pytest.mark.parametrize("dtype, tokens, in_features, count, with_bias", [
    (torch.float16, 3, 640, 2, False),
    (torch.float32, 17, 256, 3, True),
    (torch.bfloat16, 64, 512, 3, True),
])  # fmt: skip
def test_dense(dtype, tokens, in_features, count, with_bias, kernel_device, nan_poison):
    make = lambda *shape: torch.randn(*shape, device=kernel_device).to(dtype)  # noqa: E731
    x = make(tokens, in_features)
    weights = [make(size, in_features) / in_features**0.5 for size in SIZES[:count]]
    biases = [make(size) if with_bias else None for size in SIZES[:count]]
    actual = efficient_linear.joined_linear(x, weights, biases)
    for y, weight, bias in zip(actual, weights, biases, strict=True):
        assert y.dtype == dtype
        product = x.float() @ weight.float().t()
        check(y, product if bias is None else product + bias.float())


@pytest.mark.parametrize("dtype, tokens, shape, with_bias", [
    (torch.float16, 2, (70, 1100), True),
    (torch.float32, 20, (40, 200), False),
    (torch.bfloat16, 40, (33, 640), False),
])  # fmt: skip
def test_dense_gate_and_up(dtype, tokens, shape, with_bias, kernel_device, nan_poison):
    make = lambda *shape: torch.randn(*shape, device=kernel_device).to(dtype)  # noqa: E731
    x, gate, up = make(tokens, shape[1]), make(*shape) / shape[1] ** 0.5, make(*shape) / shape[1] ** 0.5
    biases = (make(shape[0]), make(shape[0])) if with_bias else (None, None)
    products = [
        x.float() @ weight.float().t() + (0 if bias is None else bias.float())
        for weight, bias in zip((gate, up), biases)
    ]
    expected = torch.nn.functional.silu(products[0]) * products[1]
    tolerances = {**TOLERANCES, torch.float32: (5e-6, 2e-5)}[dtype]
    check(efficient_linear.gate_up_silu_dense(x, gate, up, *biases), expected, tolerances)


@pytest.mark.parametrize("bits, group_size, symmetric, with_bias, dtype, in_features, tokens, count", [
    (4, 64, False, False, torch.float16, 640, 2, 2),
    (4, 128, True, True, torch.bfloat16, 333, 20, 2),
    (8, -1, True, False, torch.float16, 200, 1, 3),
    (3, 32, False, True, torch.float32, 300, 3, 2),
])  # fmt: skip
def test_packed(bits, group_size, symmetric, with_bias, dtype, in_features, tokens, count, kernel_device, nan_poison):
    x, weights = torch.randn(tokens, in_features, device=kernel_device).to(dtype), []
    for size in SIZES[:count]:
        packed, scale, zero, layout = random_weight(
            size, in_features, bits, group_size, symmetric, dtype, kernel_device
        )
        bias = torch.randn(size, device=kernel_device).to(dtype) if with_bias else None
        weights.append((packed, scale / in_features**0.5, zero, bias))
    for y, weight in zip(efficient_linear.joined_weight_only_linear(x, weights, **layout), weights, strict=True):
        check(y, efficient_linear.weight_only_linear_reference(x, *weight, **layout))


@pytest.mark.parametrize("sizes", [(1, 33), (33, 1, 20), (1, 1)])
@pytest.mark.parametrize("group_size", [64, None])
def test_packed_weights_of_one_row(group_size, sizes, kernel_device, nan_poison):
    x = torch.randn(2, 256, device=kernel_device)
    made = [random_weight(size, 256, 4, group_size, False, torch.float32, kernel_device) for size in sizes]
    weights = [(packed, scale, zero, None) for packed, scale, zero, _ in made]
    layout = made[0][-1]
    for y, weight in zip(efficient_linear.joined_weight_only_linear(x, weights, **layout), weights, strict=True):
        check(y, efficient_linear.weight_only_linear_reference(x, *weight, **layout))


@pytest.mark.parametrize("format, tokens, in_features, count, per_row", [
    ("int8", 3, 640, 2, True),
    ("int8_asymmetric", 17, 256, 3, True),
    ("fp8", 5, 384, 3, False),
])  # fmt: skip
def test_8_bits(format, tokens, in_features, count, per_row, kernel_device, nan_poison):
    """As each product by itself, bit for bit."""
    x = torch.randn(tokens, in_features, device=kernel_device)
    codes, scale, zero = efficient_linear.quantize(x, format)
    weights = []
    for size in SIZES[:count]:
        w_codes, w_scale, _ = efficient_linear.quantize(
            torch.randn(size, in_features, device=kernel_device), format[:4].rstrip("_")
        )
        w_scale = w_scale if per_row else w_scale[0]
        sums = w_codes.sum(1, dtype=torch.int32) if zero is not None else None
        weights.append((w_codes, w_scale, sums, torch.randn(size, device=kernel_device)))
    actual = efficient_linear.joined_w8a8_linear(codes, weights, scale, zero, out_dtype=torch.float32)
    for y, (w_codes, w_scale, sums, bias) in zip(actual, weights, strict=True):
        if format == "fp8":
            expected = efficient_linear.fp8_linear(codes, w_codes, scale, w_scale, bias, out_dtype=torch.float32)
            check(y, expected, (2e-6, 1e-5))
        else:
            zeros = dict(x_zero_point=zero, w_sums=sums)
            expected = efficient_linear.w8a8_linear(
                codes, w_codes, scale, w_scale, bias, **zeros, out_dtype=torch.float32
            )
            assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_residual", [True, False])
def test_sum_and_norm(has_residual, dtype, kernel_device, nan_poison):
    make = lambda *shape: torch.randn(*shape, device=kernel_device).to(dtype)  # noqa: E731
    x, weight = make(5, 2 * 200)[:, :200], make(200)
    residual = make(5, 200) if has_residual else None
    total, y = efficient_linear.add_rms_norm(x, weight, 1e-5, residual)
    expected, normalised = efficient_linear.add_rms_norm_reference(x, weight, 1e-5, residual)
    assert (total is None) == (expected is None)
    unit = torch.finfo(dtype).eps
    if has_residual:
        check(total, expected.float(), (unit, unit))
    check(y, normalised.float(), (2 * unit, 2 * unit), "norm and product are rounded")


def test_errors(kernel_device):
    x, weight = torch.randn(2, 64, device=kernel_device), torch.randn(32, 64, device=kernel_device)
    joined, norm = efficient_linear.joined_linear, efficient_linear.add_rms_norm
    codes = torch.ones(32, 64, dtype=torch.int8, device=kernel_device)
    sums, scale = torch.zeros(32, 2, dtype=torch.int32, device=kernel_device), torch.ones(1, device=kernel_device)
    check_errors(
        (ValueError, "1 weights: allowed are 2 to 3", lambda: joined(x, [weight], [None])),
        (ValueError, "65 rows: allowed are at most 64", lambda: joined(x[:1].expand(65, -1), [weight] * 2, [None] * 2)),
        (ValueError, "bias differs", lambda: joined(x, [weight] * 2, [None, weight[:, 0].contiguous()])),
        (ValueError, "float16", lambda: joined(x, [weight.half()] * 2, [None] * 2)),
        (
            ValueError,
            "up .32, 32.: allowed is one",
            lambda: efficient_linear.gate_up_silu_dense(x, weight, weight[:, :32]),
        ),
        (
            ValueError,
            r"w_sums is torch.int32 \(32,\) with strides \(2,\): allowed is a contiguous",
            lambda: efficient_linear.joined_w8a8_linear(
                codes[:1], [(codes, scale, sums[:, 0], None)] * 2, scale, codes[0, :1], out_dtype=torch.float32
            ),
        ),
        (ValueError, "weight is torch.float16", lambda: norm(x, weight[0].half(), 1e-5)),
    )
