"""The ops of packed weights on a CPU: fakes, autograd and torch.compile agree with the kernels' references."""

import pytest
import torch
from helpers import assert_close

import hf_efficient.kernels.linear.codebook
import hf_efficient.kernels.linear.gate_up
import hf_efficient.kernels.linear.grouped
import hf_efficient.kernels.linear.sparse24
import hf_efficient.kernels.linear.ternary  # noqa: F401
from hf_efficient.kernels import efficient_linear as el
from hf_efficient.kernels.efficient_linear import sparse24, sparse24_packing, ternary, ternary_packing


OPS = torch.ops.hf_efficient


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
    codebook = torch.randn(40, 2**bits)
    x, bias = torch.randn(5, 200, requires_grad=True), torch.randn(40, requires_grad=True)
    scale = torch.rand(40, 4)
    layout = dict(bits=bits, group_size=64, in_features=200)
    arguments = (x, packed, codebook, scale, bias, *layout.values())
    torch.library.opcheck(OPS.codebook_linear.default, arguments)
    expected = el.codebook_linear_reference(x, packed, codebook, scale, bias, **layout)
    check(OPS.codebook_linear, arguments, expected, (x, bias))


def test_weight_only():
    codes = torch.randint(0, 16, (40, 200), dtype=torch.uint8)
    packed = el.pack_weight(el.pack_canonical(codes, 4), 4, 64)
    x, bias = torch.randn(5, 200, requires_grad=True), torch.randn(40, requires_grad=True)
    layout = dict(bits=4, group_size=64, in_features=200)
    arguments = (x, packed, torch.rand(40, 4), None, bias, *layout.values())
    torch.library.opcheck(OPS.weight_only_linear.default, arguments)
    check(OPS.weight_only_linear, arguments, el.weight_only_linear_reference(*arguments[:5], **layout), (x, bias))


def test_experts():
    codes = torch.randint(0, 16, (3, 40, 200), dtype=torch.uint8)
    packed = torch.stack([el.pack_weight(el.pack_canonical(part, 4), 4, 64) for part in codes])
    x, bias = torch.randn(5, 200, requires_grad=True), torch.randn(3, 40, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    layout = dict(bits=4, group_size=64, in_features=200)
    zero_point = torch.randint(0, 16, (3, 40, 4), dtype=torch.uint8)
    arguments = (x, packed, torch.rand(3, 40, 4), zero_point, bias, offsets, *layout.values())
    expected = el.grouped_linear_reference(*arguments[:5], offsets=offsets, **layout)
    check(OPS.grouped_linear, arguments, expected, (x, bias))


def test_gate_and_up(bits=4):
    layout = dict(bits=bits, group_size=64, in_features=200)
    x = torch.randn(5, 200, requires_grad=True)
    sides = []
    for _ in range(2):
        codes = torch.randint(0, 2**bits, (40, 200), dtype=torch.uint8)
        packed = el.pack_weight(el.pack_canonical(codes, bits), bits, 64)
        zero_point = torch.randint(0, 2**bits, (40, 4), dtype=torch.uint8)
        bias = torch.randn(40, requires_grad=True)
        sides.append((packed, torch.rand(40, 4) / 2**bits, zero_point, bias))
    arguments = (x, *sides[0], *sides[1], *layout.values())
    torch.library.opcheck(OPS.gate_up_silu.default, arguments)
    expected = el.gate_up_silu_reference(x, *sides, **layout)
    check(OPS.gate_up_silu, arguments, expected, (x, sides[0][3], sides[1][3]))


def check(op, arguments, expected, inputs):
    """Values and gradients of the op (opcheck has compiled it)."""
    gradients = []
    for y in (expected, op(*arguments)):
        assert_close(y, expected, 3e-6, 1e-3, "float32")
        gradients.append(torch.autograd.grad(y.sum(), inputs))
    for actual, wanted in zip(gradients[1], gradients[0]):
        assert_close(actual, wanted, 3e-6, 1e-3, "float32")
