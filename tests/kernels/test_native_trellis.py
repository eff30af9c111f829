"""Products with weights coded along a trellis by the C++ kernels, in every tier."""

import pytest
import torch

from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.kernels.hadamard import random_signs
from hf_efficient.kernels.linear.native_trellis import NativeTrellisLayout
from hf_efficient.kernels.native import tiers
from hf_efficient.kernels.replay.recorder import Capture, _interpret


BITS = 1.5, 2, 2.5, 3, 5  # of those of the format: the least, the most, whole ones and halves
BFLOAT16_ERROR = 0.003  # one rounding of the result to bfloat16 (2 ** -9), and one of the weight where rows are many


def made(bits, n, k):
    """(canonical tensors with random codes, the weight in float64, its layout)"""
    format = TrellisFormat(bits)
    qweight = torch.randint(0, 256, format.shapes(n, k)["qweight"], dtype=torch.uint8)
    tensors = {"qweight": qweight, "scale": (torch.rand(n, 1) * 0.1 + 0.01).bfloat16()}
    layout = format.layout(tensors, k, torch.bfloat16)
    return tensors, format.dequantize(tensors, k, torch.float64), layout


# Half a band, sequences of several bands, columns that are padded, more columns than 32 bits hold a sum of
@pytest.mark.parametrize(("n", "k"), [(33, 130), (70, 192), (300, 97), (16, 9000)])
@pytest.mark.parametrize("bits", BITS)
def test_products(bits, n, k, tier):
    tensors, weight, layout = made(bits, n, k)
    assert type(layout) is NativeTrellisLayout and torch.equal(layout.canonical(), tensors["qweight"])
    assert torch.equal(layout.dequantize(), TrellisFormat(bits).dequantize(tensors, k, torch.bfloat16))
    for rows in (1, 2, 3, 7, 8, 9, 40):
        x, bias = torch.randn(rows, k).bfloat16(), torch.randn(n).bfloat16()
        expected = x.double() @ weight.t() + bias.double()
        error = ((layout.matmul(x, bias).double() - expected).norm() / expected.norm()).item()
        assert error < BFLOAT16_ERROR, (rows, error)


def test_inputs_at_the_limits(tier):
    """The largest sums that 32 bits must hold, rows of zeros, and rows of very different sizes side by side."""
    n, k = 32, 8192
    tensors = {"qweight": torch.zeros(8, k, dtype=torch.uint8), "scale": torch.ones(n, 1).bfloat16()}
    layout = TrellisFormat(2).layout(tensors, k, torch.bfloat16)
    weight = TrellisFormat(2).dequantize(tensors, k, torch.float64)
    assert weight.unique().tolist() == [-126]
    x = torch.ones(4, k).bfloat16() * torch.tensor([[1e-30], [0.0], [1e30], [1e-37]]).bfloat16()
    y = layout.matmul(x).double()
    expected = x.double() @ weight.t()
    assert (y[1] == 0).all()
    torch.testing.assert_close(y, expected, rtol=2**-8, atol=0)


def test_what_is_not_finite_stays_so(tier):
    _, _, layout = made(2, 64, 160)
    x = torch.randn(4, 160).bfloat16()
    x[1, 3], x[2, 7] = torch.nan, torch.inf
    y = layout.matmul(x)
    assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()


def test_rows_do_not_depend_on_each_other(tier):
    _, _, layout = made(2.5, 64, 160)
    x = torch.randn(7, 160).bfloat16()
    together = layout.matmul(x)
    for row in range(7):
        assert torch.equal(layout.matmul(x[row : row + 1])[0], together[row])


def test_what_the_kernels_do_not_serve_is_dequantized(monkeypatch):
    _, weight, layout = made(3, 40, 64)
    tensors, weight, _ = made(3, 40, 64)
    x = torch.randn(2, 64)
    for dtype in (torch.float32, torch.float16):
        layout = TrellisFormat(3).layout(tensors, 64, dtype)
        assert not layout.replaces_qweight
        expected = x.to(dtype).double() @ weight.t()
        assert ((layout.matmul(x.to(dtype)) - expected).norm() / expected.norm()).item() < 0.001
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    assert not TrellisFormat(3).layout(tensors, 64, torch.bfloat16).replaces_qweight


def test_other_inputs_are_refused(tier):
    _, _, layout = made(2, 32, 64)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(1, 64\)"):
        layout.product(torch.randn(1, 64), None)
    with pytest.raises(ValueError, match=r"the layout is for torch.bfloat16 \[..., 64\]"):
        layout.product(torch.randn(1, 32).bfloat16(), None)


@pytest.mark.usefixtures("two_threads")
def test_a_captured_product_of_rotated_inputs(tier):
    tensors, _, _ = made(2, 70, 96)
    tensors |= {"rotation_signs": random_signs(96), "input_scale": torch.rand(96).bfloat16() + 0.5}
    layout = TransformedFormat(TrellisFormat(2), True, True).layout(tensors, 96, torch.bfloat16)
    x, bias = torch.randn(2, 96).bfloat16(), torch.randn(70).bfloat16()
    capture = Capture(lambda: layout.matmul(x, bias))
    assert all(getattr(step, "func", None) is _interpret for step in capture._steps)
    for _ in range(2):
        x.copy_(torch.randn(2, 96))
        assert torch.equal(capture.replay(), layout.matmul(x, bias))
