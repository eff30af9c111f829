"""Products with inputs rounded to int8 by the C++ kernels, against torch's operators bit for bit: every tier, number of
rows, kind of grid."""

import pytest
import torch

from hf_efficient.kernels.linear import native_rounded, w8a8_cpu
from hf_efficient.kernels.linear.native_rounded import NativeRoundedLayout


ROWS = (1, 2, 3, 4, 5, 9, 40)  # one to several at once, and from 5 on tiles
SHAPES = ((70, 192), (64, 64), (33, 130), (16, 4), (48, 1000))  # whole blocks and parts, whole spans and parts


def int8_weight(n: int, k: int, has_zero: bool):
    """(codes, scale, zero point or None)"""
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    zero = torch.randint(-20, 20, (n, 1), dtype=torch.int8) if has_zero else None
    return codes, torch.rand(n, 1) * 0.01 + 0.001, zero


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("has_zero", [False, True], ids=["symmetric weight", "zero points"])
@pytest.mark.parametrize("format", ["int8", "int8_asymmetric"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_bits_of_torchs_operators(dtype, format, has_zero, static, tier):
    is_asymmetric = format == "int8_asymmetric"
    for n, k in SHAPES:
        codes, scale, zero = int8_weight(n, k, has_zero)
        x_scale = torch.tensor([0.05]) if static else None
        x_zero = torch.tensor([7], dtype=torch.int8) if static and is_asymmetric else None
        static_inputs = dict(x_scale=x_scale, x_zero=x_zero)
        layout = NativeRoundedLayout.pack(codes, 128, scale, zero, dtype, asymmetric=is_asymmetric, **static_inputs)
        assert torch.equal(layout.numbers(128), codes), "packing loses nothing"
        assert torch.equal(layout.dequantize(), w8a8_cpu.dequantize(codes, scale, zero, dtype))
        sums = codes.sum(1, dtype=torch.int32) if is_asymmetric else None
        for rows in ROWS:
            x, bias = (torch.randn(rows, k) * 3).to(dtype), torch.randn(n).to(dtype)
            expected = w8a8_cpu.linear(x, codes, scale, bias, format, x_scale, x_zero, zero, sums)
            assert torch.equal(layout.matmul(x, bias), expected), (n, k, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ternary_weights_in_two_bits(dtype, tier):
    trits, scale = torch.randint(-1, 2, (70, 200), dtype=torch.int8), torch.tensor([[0.3]])
    layout = NativeRoundedLayout.pack(trits, 1, scale, None, dtype, bits=2)
    assert layout.tensors["packed"].nbytes == 80 * 208 // 4 and torch.equal(layout.numbers(1), trits)
    for rows in ROWS:
        x = torch.randn(rows, 200).to(dtype)
        assert torch.equal(layout.matmul(x), w8a8_cpu.linear(x, trits, scale, None, "int8", None, None, None, None))


def test_outlier_columns_are_not_rounded(tier):
    codes, scale, _ = int8_weight(70, 192, False)
    layout = NativeRoundedLayout.pack(codes, 128, scale, None, torch.float32, threshold=6.0)
    for rows in ROWS:
        x, bias = torch.randn(rows, 192), torch.randn(70)
        x[:, 5], x[-1, 77], x[0, 191] = 60.0, 9.0, -6.0
        expected = w8a8_cpu.llm_int8_product(x, codes, scale, bias, 6.0)
        # three products are summed in another order
        torch.testing.assert_close(layout.matmul(x, bias), expected, rtol=1e-6, atol=1e-5 * expected.abs().max().item())


def test_rows_have_the_same_bits_alone_and_with_any_number_of_threads(tier):
    codes, scale, _ = int8_weight(100, 320, False)
    layout = NativeRoundedLayout.pack(codes, 128, scale, None, torch.bfloat16)
    x = torch.randn(50, 320).bfloat16()
    alone, before = torch.cat([layout.matmul(row[None]) for row in x]), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(layout.matmul(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_row_that_is_not_finite_shows_it(value, asymmetric, tier):
    codes, scale, _ = int8_weight(32, 64, False)
    layout = NativeRoundedLayout.pack(codes, 128, scale, None, torch.float32, asymmetric=asymmetric)
    x = torch.randn(2, 64)
    x[0, 3] = value
    y = layout.matmul(x)
    assert not y[0].isfinite().any() and y[1].isfinite().all()


def test_gradients_and_wrong_inputs(tier):
    codes, scale, _ = int8_weight(32, 64, False)
    layout = NativeRoundedLayout.pack(codes, 128, scale, None, torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    layout.matmul(x).sum().backward()
    assert torch.allclose(x.grad, layout.dequantize().sum(0).expand(3, -1), rtol=1e-5)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 \(3, 64\) on cpu, the layout is for torch.float32"):
        layout.matmul(torch.randn(3, 64).bfloat16())
    assert NativeRoundedLayout.pack(codes, 128, scale, None, torch.float64) is None, "not a dtype of the kernels"
    assert native_rounded.kernel(8) is not None
