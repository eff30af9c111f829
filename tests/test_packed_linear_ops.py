"""The ops of ternary and 2:4 weights on a CPU: fakes, autograd and torch.compile agree with the kernels' references."""

import pytest
import torch
from helpers import assert_close

import hf_efficient.kernels.sparse24_linear
import hf_efficient.kernels.ternary_linear  # noqa: F401
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


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_ternary(tokens):
    arguments = ternary_arguments(tokens)
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
    compiled = torch.compile(OPS.sparse24_linear, fullgraph=True, backend="aot_eager")
    gradients = []
    for y in (expected, OPS.sparse24_linear(*arguments), compiled(*arguments)):
        assert_close(y, expected, 2e-6, 1e-4, "float32")
        gradients.append(torch.autograd.grad(y.sum(), (x, bias)))
    for found in gradients[1:]:
        for actual, wanted in zip(found, gradients[0]):
            assert_close(actual, wanted, 2e-6, 1e-4, "float32")
