"""float8 products against float64: natively on CUDA, through the Triton interpreter elsewhere."""

import linear_checks
import pytest
import torch
import triton
import triton.language as tl

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import (
    activation_quant_kernels,
    activation_reference,
    fp8,
    w8a8,
    w8a8_kernels,
)


# codes are multiplied exactly and added in float32 (on Hopper in blocks of 128 with 14 bits: 2^-13), then rounded
FLOAT32 = (1e-6, 2e-6) if w8a8.INTERPRETED else (2**-12, 2**-11)


def check(actual, expected):
    linear_checks.check(actual, expected, FLOAT32 if actual.dtype is torch.float32 else None)


def problem(kind, tokens, out_features, in_features, device):
    """Codes of all magnitudes and both scales."""
    blocks = -(-in_features // 128)
    shapes = {
        "tensor": ((), (1, 1)),
        "channel": ((tokens, 1), (out_features,)),
        "block": ((tokens, blocks), (-(-out_features // 128), blocks)),
    }[kind]
    codes = [
        torch.randint(0, 256, (rows, in_features), dtype=torch.uint8, device=device) for rows in (tokens, out_features)
    ]
    codes = [torch.where(code & 127 == 127, code - 1, code).view(torch.float8_e4m3fn) for code in codes]
    return *codes, *(torch.rand(shape, device=device) + 0.5 for shape in shapes)


SHAPES = [(1, 40, 301), (3, 37, 256), (17, 150, 1296), (130, 140, 144), (130, 37, 130), (2, 1, 1)]


@pytest.mark.parametrize("native", [False, True], ids=["shifts", "native"])
@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_product(kind, native, kernel_device, nan_poison, monkeypatch):
    """Both ways to multiply: the interpreter runs the kernel of GPUs that have float8 too."""
    if not native or w8a8.INTERPRETED:
        monkeypatch.setattr(fp8, "has_fp8", lambda device: native)
    elif not fp8.has_fp8(torch.device("cuda")):
        pytest.skip("this GPU has no float8")
    for number, (tokens, out_features, in_features) in enumerate(SHAPES):
        x, w, x_scale, w_scale = problem(kind, tokens, out_features, in_features, kernel_device)
        bias = torch.randn(out_features, device=kernel_device) if number % 2 else None
        expected = activation_reference.fp8_linear_reference(x, w, x_scale, w_scale, bias)
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        check(efficient_linear.fp8_linear(x, w, x_scale, w_scale, bias, out_dtype=dtype), expected)


def test_strided_rows_and_scales(kernel_device, nan_poison):
    x, w, x_scale, w_scale = problem("block", 17, 150, 300, kernel_device)
    expected = activation_reference.fp8_linear_reference(x[::2], w, x_scale[::2], w_scale)
    column_major = x_scale[::2].t().contiguous().t()
    actual = efficient_linear.fp8_linear(x[::2], w, column_major, w_scale.t().contiguous().t(), out_dtype=torch.float32)
    check(actual, expected)


def test_k_is_split_and_the_counters_come_back_to_zero(kernel_device, nan_poison, arrivals):
    for kind in ("channel", "block"):
        arguments = problem(kind, 3, 100, 1536, kernel_device)
        actual = efficient_linear.fp8_linear(*arguments, out_dtype=torch.float32)
        check(actual, activation_reference.fp8_linear_reference(*arguments))
    assert len(arrivals) == 2 and not any(counter.any() for counter in arrivals)


@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_scaled_mm_takes_over_where_the_table_says(kind, kernel_device, monkeypatch):
    if not w8a8.INTERPRETED and not fp8.has_fp8(torch.device("cuda")):
        pytest.skip("this GPU has no float8")
    x, w, x_scale, w_scale = problem(kind, 32, 48, 64, kernel_device)
    bias = torch.randn(48, device=kernel_device)
    expected = activation_reference.fp8_linear_reference(x, w, x_scale, w_scale, bias)
    launched = []
    monkeypatch.setattr(fp8, "launch", lambda *arguments, **keywords: launched.append(arguments))
    monkeypatch.setitem(fp8.SCALED_MM_FROM, kind, 32)
    check(efficient_linear.fp8_linear(x, w, x_scale, w_scale, bias), expected)
    assert not launched
    efficient_linear.fp8_linear(x[:31], w, x_scale if kind == "tensor" else x_scale[:31], w_scale, bias)
    assert len(launched) == 1


@triton.jit
def convert_kernel(codes_ptr, half_ptr, values_ptr, rounded_ptr, SIZE: tl.constexpr, VALUES: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(half_ptr + at, w8a8_kernels.e4m3_to_float16(tl.load(codes_ptr + at)))
    at = tl.arange(0, VALUES)
    tl.store(rounded_ptr + at, activation_quant_kernels.round_to_e4m3(tl.load(values_ptr + at)))


def test_conversions_by_shifts_are_exact(kernel_device):
    """All bytes but NaN; all float8 values, the middles between neighbours, and floats right beside the middles."""
    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device)
    numbers = codes.view(torch.float8_e4m3fn).float()
    grid = numbers[:127]
    middles = (grid[1:] + grid[:-1]) / 2
    values = torch.cat([grid, middles, middles.nextafter(middles * 0), middles.nextafter(middles * 2)])
    values = torch.nn.functional.pad(torch.cat([values, -values]), (0, 1024 - 2 * len(values)))
    half = torch.empty(256, dtype=torch.float16, device=kernel_device)
    rounded = torch.empty(1024, dtype=torch.uint8, device=kernel_device)
    convert_kernel[(1,)](codes, half, values, rounded, SIZE=256, VALUES=1024)
    numeric = codes & 127 != 127
    assert torch.equal(half[numeric].float() * 256, numbers[numeric])
    assert torch.equal(rounded, values.to(torch.float8_e4m3fn).view(torch.uint8))


def test_bad_arguments_are_named(kernel_device):
    x, w, x_scale, w_scale = problem("channel", 3, 150, 300, kernel_device)
    blocks = torch.ones(2, 3, device=kernel_device)
    linear = efficient_linear.fp8_linear
    linear_checks.check_errors(
        (TypeError, "w_codes has dtype", lambda: linear(x, w.view(torch.int8), x_scale, w_scale)),
        (ValueError, "x_scale has shape", lambda: linear(x, w, blocks, w_scale)),
        (ValueError, "w_scale has shape", lambda: linear(x, w, x_scale, blocks)),
        (TypeError, "w_scale has dtype", lambda: linear(x, w, torch.ones(3, 3, device=kernel_device), blocks.half())),
        (TypeError, "out_dtype=torch.float64", lambda: linear(x, w, x_scale, w_scale, out_dtype=torch.float64)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 2000])
@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_native_real_sizes_and_determinism(kind, tokens):
    arguments = problem(kind, tokens, 4096, 7168, "cuda")
    first = linear_checks.check_graph(lambda: efficient_linear.fp8_linear(*arguments))
    check(first, activation_reference.fp8_linear_reference(*arguments))
