"""Layouts of pruned weights: the C++ kernel, dense weights where there is none, the Triton kernels' 2:4 product."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from test_sparse_formats import FORMATS, sparse_tensors

from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.sparse24 import Sparse24Format
from hf_efficient.kernels.linear import native_sparse
from hf_efficient.kernels.replay.recorder import Capture, _interpret
from hf_efficient.layers import compress_linear


pytestmark = pytest.mark.usefixtures("two_threads")
# rows that fill no block, columns no step; more columns than a tile
SHAPES = [(37, 136), (16, 32), (3, 24), (64, 4224)]
ROWS = (1, 2, 7, 45)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check(layout, weight: torch.Tensor, rows: int) -> None:
    """Against float64."""
    x, bias = torch.randn(rows, weight.shape[1]).to(layout.dtype), torch.randn(len(weight)).to(layout.dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    magnitudes = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs()).max().item()
    rounding = torch.finfo(layout.dtype).eps
    rms = rounding * (1 if layout.dtype is torch.bfloat16 else 8)
    why = "one rounding of the result, and of each weight where a scale multiplies it; of each sum in float32"
    assert_close(layout.matmul(x, bias), expected.to(layout.dtype), rms, 2 * rounding * magnitudes, why)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_layouts_of_a_cpu(format, tier_or_torch):
    for columns in (136, 1024):
        tensors, weight, _ = sparse_tensors(format, 32, columns)
        for dtype in (torch.bfloat16, torch.float32):
            layout = format.layout(tensors, columns, dtype)
            assert layout.dtype is dtype
            check(layout, weight if format.weights is None else format.dequantize(tensors, columns, dtype), 3)
            if layout.replaces_qweight:
                assert torch.equal(as_bytes(layout.canonical()), as_bytes(tensors["qweight"]))
            if format.weights is None:
                assert torch.equal(layout.dequantize(), weight.to(dtype))


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_kernel(rows, columns, tier):
    """Few rows of x and many, the stream's last values at the end of a page that may not be read past."""
    for format in (Sparse24Format(), BitmapFormat(sparsity=0.9, group="layer"), BitmapFormat(sparsity=0.02)):
        tensors, weight, _ = sparse_tensors(format, rows, columns)
        layout = format.layout(tensors, columns, torch.bfloat16)
        assert isinstance(layout, native_sparse.NativeSparseLayout)
        padded = rows % native_sparse.LANES or columns % native_sparse.COLUMNS
        assert layout.two_of_four == (isinstance(format, Sparse24Format) and not padded)
        for count in ROWS:
            check(layout, weight, count)
        x = torch.randn(ROWS[-1], columns).bfloat16()
        together = layout.matmul(x[:7])
        assert torch.equal(together[4:5], layout.matmul(x[4:5])), "a row has the same bits alone and among others"
        assert layout.replaced.keys() == tensors.keys(), "neither values nor the mask lie in memory twice"
        for name, restore in layout.replaced.items():
            assert torch.equal(as_bytes(restore()), as_bytes(tensors[name]))


def test_op(tier):
    tensors, weight, _ = sparse_tensors(Sparse24Format(), 40, 96)
    layout = Sparse24Format().layout(tensors, 96, torch.bfloat16)
    x, bias = torch.randn(5, 96).bfloat16().requires_grad_(), torch.randn(40).bfloat16().requires_grad_()
    arguments = (x, *layout.tensors.values(), bias, *layout.sizes)
    torch.library.opcheck(torch.ops.hf_efficient.cpu_sparse_linear.default, arguments)
    layout.matmul(x, bias).backward(torch.ones(5, 40).bfloat16())
    assert torch.equal(bias.grad, torch.full((40,), 5.0).bfloat16())
    assert torch.equal(x.grad, torch.ones(5, 40).bfloat16() @ weight)
    compiled = torch.compile(lambda x: layout.matmul(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.detach()), layout.matmul(x.detach()) + 1)
    with pytest.raises(ValueError, match="the layout is for torch.bfloat16"):
        layout.matmul(x.detach().float())


def test_captured_products_of_one_input_are_one_instruction(tier):
    layouts, weights = [], []
    for format, rows in ((Sparse24Format(), 32), (BitmapFormat(sparsity=0.7), 20)):
        tensors, weight, _ = sparse_tensors(format, rows, 72)
        layouts.append(format.layout(tensors, 72, torch.bfloat16))
        weights.append(weight)
    x, bias = torch.randn(2, 72).bfloat16(), torch.randn(32).bfloat16()
    capture = Capture(lambda: (layouts[0].matmul(x, bias), layouts[1].matmul(x)))
    assert [step.func for step in capture._steps] == [_interpret] and len(capture._steps[0].args[0]) == 1
    x.copy_(torch.randn(2, 72))
    for output, expected in zip(capture.replay(), (layouts[0].matmul(x, bias), layouts[1].matmul(x))):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("format", FORMATS[:4], ids=str)
def test_layers_save_what_they_loaded(format):
    linear = torch.nn.Linear(136, 32).bfloat16()
    tensors, weight, _ = sparse_tensors(format, 32, 136)
    layer = compress_linear(linear, format, tensors)
    x = torch.randn(4, 136).bfloat16()
    y = layer(x)
    assert all(torch.equal(as_bytes(layer.state_dict()[name]), as_bytes(tensors[name])) for name in tensors)
    layer.float()
    maximum = 2**-7 * y.abs().max().item()  # two steps of bfloat16 at the largest result
    assert_close(layer(x.float()).bfloat16(), y, 2**-7, maximum, "one of them was rounded to bfloat16 on the way")
    assert all(torch.equal(as_bytes(layer.state_dict()[name]), as_bytes(tensors[name])) for name in tensors)


def test_a_layer_that_lies_says_so_when_it_first_computes():
    layer = torch.nn.Linear(24, 8, dtype=torch.bfloat16)
    tensors, _, _ = sparse_tensors(BitmapFormat(), 8, 24)
    layer = compress_linear(layer, BitmapFormat(), tensors)
    layer.bitmap[3, 0] ^= 1
    with pytest.raises(ValueError, match=r"keeps \[9[57]\] of \(8, 24\) weights"):
        layer(torch.randn(1, 24).bfloat16())


@pytest.mark.parametrize("format", [Sparse24Format(), *FORMATS[1:3]], ids=str)
def test_layout_of_the_triton_kernels(format):
    """On the CPU, where the op expands what the kernels read."""
    tensors, weight, mask = sparse_tensors(format, 70, 200)
    values, mask = format.codes(tensors, 200)
    layout = format.triton_layout(tensors, values, mask, torch.bfloat16)
    assert layout.replaced.keys() == {"qweight", "places"}
    for name, restore in layout.replaced.items():
        assert torch.equal(as_bytes(restore()), as_bytes(tensors[name]))
    error = (layout.dequantize().double() - weight.double()).abs()
    assert (error <= 2**-8 * weight.abs()).all(), "codes are scaled in float32 there, in bfloat16 here"
    check(layout, weight, 3)
