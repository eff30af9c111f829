"""Products with weights of two binary terms by the C++ kernels, in every tier."""

import pytest
import torch
from helpers import assert_close

from hf_efficient.formats.binary import DualBinaryFormat, SplitBinaryFormat
from hf_efficient.kernels.linear.layout import RestoredLayout
from hf_efficient.kernels.linear.native_binary import NativeBinaryLayout
from hf_efficient.kernels.native import tiers
from hf_efficient.kernels.replay.recorder import Capture, _interpret


FORMATS = DualBinaryFormat, SplitBinaryFormat
ERRORS = {  # of results, relative to their norm
    torch.float32: 3e-6,  # sums of 512 numbers in order, then of their sums
    torch.bfloat16: 0.004,  # one rounding of the result (2 ** -9), and one of the weight where rows are many
    torch.float16: 0.0005,
}


def made(of, n, k, group_size, dtype):
    """(the format, canonical tensors with random codes)"""
    format = of(group_size)
    groups = format.groups(k)
    factors = torch.randint(1, 128, (n, format.KINDS * groups), dtype=torch.int8)
    own = {"factors": factors, "scale": (torch.rand(n, 1) * 0.1 + 0.01).to(dtype)}
    if of is DualBinaryFormat:
        factors[:, groups:].neg_()
    else:
        own["salient"] = format.pack_salient(torch.rand(k) < 0.2)
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8)
    tensors = {"qweight": format.pack(codes), **own}
    format.check(tensors, k)
    return format, tensors


# Blocks that are not full, a short last group, columns that are padded, one group, sums of several segments
@pytest.mark.parametrize(("n", "k", "group_size"), [(48, 80, 32), (33, 130, -1), (70, 192, 64), (16, 1300, -1)])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("of", FORMATS)
def test_products(of, dtype, n, k, group_size, tier):
    format, tensors = made(of, n, k, group_size, dtype)
    layout = format.layout(tensors, k, dtype)
    assert type(layout) is NativeBinaryLayout and torch.equal(layout.canonical(), tensors["qweight"])
    assert torch.equal(layout.dequantize(), format.dequantize(tensors, k, dtype))
    weight = format.dequantize(tensors, k, torch.float64)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 40):
        x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)
        expected = x.double() @ weight.t() + bias.double()
        assert ((layout.matmul(x, bias).double() - expected).norm() / expected.norm()).item() < ERRORS[dtype], rows


@pytest.mark.parametrize("of", FORMATS)
def test_what_is_not_finite_stays_so(of, tier):
    format, tensors = made(of, 48, 80, 32, torch.bfloat16)
    layout = format.layout(tensors, 80, torch.bfloat16)
    for rows in (4, 40):
        x = torch.randn(rows, 80).bfloat16()
        x[1, 3], x[2, 79] = torch.nan, torch.inf
        y = layout.matmul(x)
        assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()


@pytest.mark.parametrize("of", FORMATS)
def test_rows_do_not_depend_on_each_other(of, tier):
    format, tensors = made(of, 48, 80, 32, torch.bfloat16)
    layout, x = format.layout(tensors, 80, torch.bfloat16), torch.randn(4, 80).bfloat16()
    assert torch.equal(layout.matmul(x), torch.cat([layout.matmul(row[None]) for row in x]))


@pytest.mark.parametrize("of", FORMATS)
def test_what_the_kernels_do_not_serve_runs_in_8_bits(of, monkeypatch):
    format, tensors = made(of, 40, 96, 24, torch.bfloat16)  # groups that are no whole lines
    tensors["factors"] = tensors["factors"] * 0 + torch.arange(7, 7 + format.KINDS).repeat_interleave(4).to(torch.int8)
    if of is DualBinaryFormat:
        tensors["factors"][:, 4:].neg_()
    tensors["qweight"] = format.codes_of(format.integers(tensors, 96), tensors)
    layout, x = format.layout(tensors, 96, torch.bfloat16), torch.randn(2, 96).bfloat16()
    assert type(layout) is RestoredLayout
    assert_close(layout.matmul(x), x.double() @ format.dequantize(tensors, 96, torch.float64).t(), 0.01, 0.1, "8 bits")
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    format, tensors = made(of, 40, 96, 32, torch.bfloat16)
    assert type(format.layout(tensors, 96, torch.bfloat16)) is not NativeBinaryLayout


@pytest.mark.parametrize("of", FORMATS)
def test_tensors_that_do_not_belong_together_are_refused(of, tier):
    format, tensors = made(of, 48, 80, 32, torch.bfloat16)
    parts, scheme = (layout := format.layout(tensors, 80, torch.bfloat16)).parts, layout.scheme
    names = "packed", "factors", "scale", "marks"
    for index, part in enumerate(parts):
        if part is not None:
            bad = [*parts[:index], part[..., :-1], *parts[index + 1 :]]
            with pytest.raises(ValueError, match=f"{names[index]} is "):
                NativeBinaryLayout(*bad, *scheme, torch.bfloat16)
    with pytest.raises(ValueError, match="group is 27: allowed are multiples of 16"):
        NativeBinaryLayout(*parts, 27, 48, 80, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(1, 80\)"):
        layout.product(torch.randn(1, 80), None)


@pytest.mark.parametrize("of", FORMATS)
def test_gradients_and_the_fake_op(of, tier):
    format, tensors = made(of, 40, 96, 32, torch.float32)
    layout = format.layout(tensors, 96, torch.float32)
    x, bias = torch.randn(5, 96, requires_grad=True), torch.randn(40, requires_grad=True)
    torch.library.opcheck(torch.ops.hf_efficient.cpu_binary_linear.default, (x, *layout.parts, bias, *layout.scheme))
    weight = format.dequantize(tensors, 96, torch.float32)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).square().sum(), (x, bias))
    found = torch.autograd.grad(layout.matmul(x, bias).square().sum(), (x, bias))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)  # of sums of 96 numbers in another order


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("of", FORMATS)
def test_captured_products_of_one_input(of, tier):
    """Those without marks may share a call. Marks belong to a weight, which shares none."""
    weights = [made(of, n, 96, 32, torch.bfloat16) for n in (48, 70, 33)]
    layouts = [format.layout(tensors, 96, torch.bfloat16) for format, tensors in weights]
    x = torch.randn(2, 96).bfloat16()
    capture = Capture(lambda: [layout.matmul(x) for layout in layouts])
    assert all(getattr(step, "func", None) is _interpret for step in capture._steps)
    for _ in range(2):
        x.copy_(torch.randn(2, 96))
        assert all(torch.equal(y, layout.matmul(x)) for y, layout in zip(capture.replay(), layouts, strict=True))
