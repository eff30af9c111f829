"""The ops of packed weights on a CPU: fakes, autograd and torch.compile agree with the kernels' references."""

import inspect

import pytest
import torch
from helpers import assert_close
from linear_checks import random_weight

import hf_efficient.kernels.linear.codebook
import hf_efficient.kernels.linear.gate_up
import hf_efficient.kernels.linear.grouped
import hf_efficient.kernels.linear.sparse24
import hf_efficient.kernels.linear.ternary
import hf_efficient.kernels.linear.trellis  # noqa: F401
from hf_efficient.kernels import efficient_linear as el
from hf_efficient.kernels.efficient_linear import sparse24, sparse24_packing, ternary, ternary_packing


OPS = torch.ops.hf_efficient
# with the shapes as they are: `test_weight_only` traces the same unpacking for all shapes, most of the time
STATIC = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def ternary_arguments(tokens=5, out_features=70, in_features=200, dtype=torch.bfloat16):
    trits = torch.randint(-1, 2, (out_features, in_features), dtype=torch.int8)
    x = torch.randint(-128, 128, (tokens, in_features), dtype=torch.int8)
    scales = torch.rand(tokens, 1), torch.rand(1)
    return x, ternary_packing.pack_ternary(trits), *scales, torch.randn(out_features), out_features, dtype


def sparse24_arguments(group_size, tokens=5, out_features=70, in_features=200, x_grad=False):
    weight = torch.randn(out_features, in_features)
    weight = weight * (torch.arange(in_features) % 4 < 2)
    bias = torch.randn(out_features, requires_grad=x_grad)
    x = torch.randn(tokens, in_features, requires_grad=x_grad)
    layout = group_size, out_features, in_features
    if group_size is None:
        return x, *sparse24_packing.pack_sparse24(weight), None, None, bias, *layout
    codes = (weight * 3).round().clamp(-8, 7).add(8).to(torch.uint8)
    scale = torch.rand(out_features, -(-in_features // group_size))
    return x, *sparse24_packing.pack_sparse24_codes(codes), scale, None, bias, *layout


def test_ternary():
    arguments = ternary_arguments()
    torch.library.opcheck(OPS.ternary_linear.default, arguments)
    expected = ternary.ternary_linear_reference(*arguments[:5], out_features=70)
    assert_close(OPS.ternary_linear(*arguments), expected, 4e-3, 3e3, "exact sums, rounded to bfloat16")
    compiled = torch.compile(lambda *a: OPS.ternary_linear(*a) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), OPS.ternary_linear(*arguments) + 1)


@pytest.mark.parametrize("group_size", [None, 64])
def test_sparse24(group_size):
    arguments = sparse24_arguments(group_size, x_grad=True)
    torch.library.opcheck(OPS.sparse24_linear.default, arguments)
    x, values, places, scale, zero_point, bias, *layout = arguments
    layout = dict(zip(("group_size", "out_features", "in_features"), layout))
    expected = sparse24.sparse24_linear_reference(x, values, places, scale, zero_point, bias, **layout)
    check(OPS.sparse24_linear, arguments, expected, (x, bias))


def test_codebook(bits=4):
    codes = torch.randint(0, 2**bits, (40, 200), dtype=torch.uint8)
    packed = el.pack_codebook_weight(el.pack_canonical(codes, bits), bits)
    tensors = (packed, torch.randn(40, 2**bits), torch.rand(40, 4))
    layout = dict(bits=bits, group_size=64, in_features=200)
    x, bias = torch.randn(5, 200, requires_grad=True), torch.randn(40, requires_grad=True)
    arguments = (x, *tensors, bias, *layout.values())
    torch.library.opcheck(OPS.codebook_linear.default, arguments, test_utils=STATIC)
    check(OPS.codebook_linear, arguments, el.codebook_linear_reference(x, *tensors, bias, **layout), (x, bias))


def test_trellis():
    qweight = torch.randint(0, 256, (4 * 2 * 3, 70), dtype=torch.uint8)
    weight = *el.pack_trellis(qweight, bits=2, out_features=90), torch.rand(90)
    x, bias = torch.randn(5, 70, requires_grad=True), torch.randn(90, requires_grad=True)
    arguments = (x, *weight, bias, 2.0)
    torch.library.opcheck(OPS.trellis_linear.default, arguments)
    expected = el.trellis_linear_reference(x, *weight, bias, bits=2)
    check(OPS.trellis_linear, arguments, expected, (x, bias))


def int4_weight():
    """(packed, scale, zero point, keywords) of a weight [40, 200]."""
    return random_weight(40, 200, 4, 64, False, torch.float32, "cpu")


def test_weight_only():
    *tensors, layout = int4_weight()
    x, bias = torch.randn(5, 200, requires_grad=True), torch.randn(40, requires_grad=True)
    arguments = (x, *tensors, bias, *layout.values())
    torch.library.opcheck(OPS.weight_only_linear.default, arguments)
    check(OPS.weight_only_linear, arguments, el.weight_only_linear_reference(*arguments[:5], **layout), (x, bias))


# operators whose lists of tensors the kernels take as tuples, one a weight
GROUPED = {"gate_up_silu", "joined_weight_only_linear", "joined_w8a8_linear"}


@pytest.mark.parametrize("name", [name for name in el.__all__ if hasattr(OPS, name) and name not in GROUPED])
def test_kernels_take_the_arguments_of_their_ops_by_name(name):
    arguments = getattr(OPS, name).default._schema.arguments
    inspect.signature(getattr(el, name)).bind(**{argument.name: None for argument in arguments})


def test_a_gradient_of_the_weight_is_refused():
    """Rather than left out in silence."""
    packed, scale, zero_point, layout = int4_weight()
    x = torch.randn(5, 200, requires_grad=True)
    y = OPS.weight_only_linear(x, packed, scale.requires_grad_(), zero_point, None, *layout.values())
    with pytest.raises(RuntimeError, match="scale requires grad: gradients are of x and bias, the weight is frozen"):
        y.sum().backward()


def test_experts():
    *parts, layouts = zip(*(int4_weight() for _ in range(3)))
    tensors, layout = [torch.stack(part) for part in parts], layouts[0]
    x, bias = torch.randn(5, 200, requires_grad=True), torch.randn(3, 40, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    arguments = (x, *tensors, bias, offsets, *layout.values())
    expected = el.grouped_linear_reference(*arguments[:5], offsets=offsets, **layout)
    check(OPS.grouped_linear, arguments, expected, (x, bias))


@pytest.mark.slow
def test_gate_and_up():
    x = torch.randn(5, 200, requires_grad=True)
    sides, layout = [], None
    for _ in range(2):
        *tensors, layout = int4_weight()
        sides.append((*tensors, torch.randn(40, requires_grad=True)))
    arguments = (x, *sides[0], *sides[1], *layout.values())
    torch.library.opcheck(OPS.gate_up_silu.default, arguments, test_utils=STATIC)
    expected = el.gate_up_silu_reference(x, *sides, **layout)
    check(OPS.gate_up_silu, arguments, expected, (x, sides[0][3], sides[1][3]))


def check(op, arguments, expected, inputs):
    """Values and gradients of the op (opcheck has compiled it)."""
    found = op(*arguments)
    assert_close(found, expected, 3e-6, 2e-3, "float32")
    for actual, wanted in zip(torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        assert_close(actual, wanted, 3e-6, 2e-3, "float32")
