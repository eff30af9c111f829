"""EfficientLinear: what it computes, holds in memory, saves, copies and casts."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_close
from torch import nn

from hf_efficient.formats import AffineFormat
from hf_efficient.formats.binary import PartlyBinaryFormat
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.kernels.linear.torch_cpu import INT4_NATIVE_ROWS
from hf_efficient.layers import PLACEHOLDER_SHAPE, EfficientLinear
from hf_efficient.methods import get_method


INT4 = AffineFormat(4, 64, False)
EIGHT_BITS = [AffineFormat(8, -1, True), AffineFormat(8, -1, False), AffineFormat(8, 64, False)]
FORMATS = [INT4, *EIGHT_BITS, AffineFormat(4, 48, False)]


def make(format=INT4, dtype=torch.bfloat16, bias=True, rows=96, columns=192):
    """(an EfficientLinear, the dense weight it stands for, its state dict before any forward)"""
    layer = EfficientLinear(columns, rows, bias, format, dtype)
    tensors = get_method("rtn").quantize(torch.randn(rows, columns).to(dtype), format)
    state = {"weight": torch.zeros(PLACEHOLDER_SHAPE, dtype=dtype), **tensors}
    if bias:
        state["bias"] = torch.randn(rows).to(dtype)
    layer.load_state_dict(state)
    return layer.requires_grad_(False), format.dequantize(tensors, columns, dtype), state


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_state_dict(format, bias):
    layer, dense, state = make(format, bias=bias)
    for shape in ((1, 192), (2, 5, 192), (3, 40, 192)):
        x = torch.randn(shape).bfloat16()
        expected = nn.functional.linear(x.float(), dense.float(), layer.bias.float() if bias else None)
        assert_close(layer(x), expected, 0.008, 0.05 * expected.abs().max().item(), "bfloat16 rounds to 3 digits")
    assert same(layer.state_dict(), state), "saving after a forward must give what was loaded, bit for bit"
    assert torch.equal(layer.dequantized(), dense)
    assert "bits=" in repr(layer) and isinstance(layer, nn.Linear)


@pytest.mark.parametrize("format", FORMATS[:2], ids=str)
def test_the_layout_replaces_the_codes_in_memory(format):
    layer, _, _ = make(format)
    dense_bytes = 96 * 192 * 2
    canonical = sum(p.nbytes for p in layer.parameters())
    layer(torch.randn(1, 192).bfloat16())
    assert not hasattr(layer, "qweight")
    held = {t.data_ptr(): t.untyped_storage().nbytes() for t in (*layer.parameters(), *layer.buffers())}
    assert sum(held.values()) <= canonical + 2 * 2 * 96 * 3  # scales for the operator beside the stored ones
    assert sum(held.values()) < (0.36 if format.bits == 4 else 0.56) * dense_bytes
    zero_point = set() if format.symmetric else {"zero_point"}
    assert set(layer.state_dict()) == {"weight", "bias", "qweight", "scale"} | zero_point


def test_dtype_of_the_input_decides():
    """A layer whose layout is for bfloat16 still takes float32 and autocast inputs, without deriving anew."""
    layer, dense, state = make()
    layer(torch.randn(1, 192).bfloat16())
    x = torch.randn(4, 192)
    expected = nn.functional.linear(x, dense.float(), layer.bias.float())
    assert_close(layer(x), expected, 0.005, 0.5, "the weights come from the bfloat16 layout")
    assert layer(x).dtype == torch.float32


def test_casts_and_moves_keep_the_numbers():
    """T10: .to(dtype) does not raise for third-party quantizers; it must not touch codes or scales."""
    layer, dense, state = make()
    layer(torch.randn(1, 192).bfloat16())
    layer.to(torch.float16)
    assert layer.weight.dtype == layer.bias.dtype == torch.float16 and layer.scale.dtype == torch.bfloat16
    x = torch.randn(3, 192).half()
    expected = nn.functional.linear(x.float(), dense.float(), layer.bias.float())
    assert_close(layer(x), expected, 0.002, 0.2, "the same weights in float16 arithmetic")
    layer.to(torch.float32).to("cpu").to(torch.bfloat16)
    after = layer.state_dict()
    assert all(torch.equal(after[k], state[k]) for k in ("qweight", "scale", "zero_point"))
    layer(x.bfloat16())
    assert layer.to("meta").qweight.is_meta


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_hold_canonical_tensors_and_are_independent(duplicate):
    """A layout is for one instruction set, and a pickle may be opened on another."""
    layer, _, state = make()
    x = torch.randn(2, 192).bfloat16()
    y = layer(x)
    assert any("packed" in name for name, _ in layer.named_buffers())
    other = duplicate(layer)
    assert not list(other.buffers()) and torch.equal(other(x), y) and same(other.state_dict(), state)
    changed = {k: (v ^ 255 if k == "qweight" else v) for k, v in state.items()}
    other.load_state_dict(changed)
    assert not torch.equal(other(x), y) and torch.equal(layer(x), y) and same(other.state_dict(), changed)


@pytest.mark.parametrize("rows", [3, INT4_NATIVE_ROWS + 1])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gradient_of_the_input(format, rows):
    layer, dense, _ = make(format, torch.float32)
    x = torch.randn(rows, 192, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    nn.functional.linear(reference, dense, layer.bias).square().sum().backward()
    assert_close(x.grad, reference.grad, 1e-4, 1e-2, "float32 on both sides")
    assert all(p.grad is None and not p.requires_grad for p in layer.parameters())


def test_gradient_with_another_dtype():
    layer, dense, _ = make()
    layer(torch.randn(1, 192).bfloat16())
    x = torch.randn(3, 192, requires_grad=True)
    layer(x).sum().backward()
    assert_close(x.grad, dense.float().sum(0).expand(3, -1), 0.01, 1.0, "weights from the bfloat16 layout")


def test_the_placeholder_cannot_be_taken_for_a_weight():
    layer, _, _ = make()
    for compute in (
        lambda: nn.functional.linear(torch.randn(2, 192).bfloat16(), layer.weight),
        lambda: layer.weight.data + torch.zeros(96, 192),
        lambda: layer.weight.data.add_(torch.zeros(96, 192)),
    ):
        with pytest.raises(RuntimeError):
            compute()


@pytest.mark.parametrize("format", FORMATS[:2], ids=str)
def test_compiles_without_graph_breaks_once_derived(format):
    layer, dense, _ = make(format)
    layer.derive_layouts(torch.bfloat16)
    x = torch.randn(2, 192).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("format", [INT4, TransformedFormat(INT4, rotation=True)], ids=str)
def test_gradients_compile_without_graph_breaks(format):
    layer, _, state = make(INT4)
    if format is not INT4:
        layer = EfficientLinear(192, 96, True, format, torch.bfloat16)
        layer.load_state_dict({**state, "rotation_signs": torch.ones(192, dtype=torch.int8)})
    x, again = (torch.randn(2, 192, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(2))
    layer.requires_grad_(False)(x.requires_grad_()).sum().backward()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(again.requires_grad_()).sum().backward()
    assert_close(again.grad, x.grad, 0.01, 0.5, "the same weight")


@pytest.mark.parametrize("format", [INT4, PartlyBinaryFormat()], ids=str)
def test_a_layer_is_exported_once_it_has_run(format):
    """Before, a layout would be made of numbers that a trace does not have."""
    layer = EfficientLinear(192, 96, False, format, torch.float32)
    blank = format.blank(96, 192, torch.float32)
    layer.load_state_dict({"weight": torch.zeros(PLACEHOLDER_SHAPE), **blank})
    x = torch.randn(2, 192)
    for trace in (torch.export.export, torch.jit.trace):
        with pytest.raises(RuntimeError, match="has not run since it was loaded, moved or copied: run it"):
            trace(layer, (x,))
    expected = layer(x)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), expected)
    assert torch.equal(torch.jit.trace(layer, (x,))(x), expected)


def test_threads_that_make_the_first_forward_together():
    module = EfficientLinear(64, 48, False, INT4, torch.bfloat16)
    with torch.no_grad():
        for name, tensor in get_method("rtn").quantize(torch.randn(48, 64).bfloat16(), INT4).items():
            getattr(module, name).copy_(tensor)
    x, barrier = torch.randn(2, 64).bfloat16(), threading.Barrier(4)
    expected = x @ module.dequantized().t()

    def forward(_):
        barrier.wait()
        return module(x)

    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        for y in pool.map(forward, range(4)):
            assert_close(y, expected, 0.02, 0.5, "bfloat16 results")
