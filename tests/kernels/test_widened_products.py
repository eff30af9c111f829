"""Products of bfloat16 in float32 against float64, and where they are taken."""

import pytest
import torch
import torch.nn.functional as F

from hf_efficient.kernels.attention.products import FastAttention, fast_training
from hf_efficient.kernels.widened_products import WidenedProducts, multiplies_bfloat16, widened_products


CPU = torch.device("cpu")


def numbers(*shape) -> torch.Tensor:
    return torch.randn(*shape).bfloat16().requires_grad_()


def close(actual, expected):
    """Sums in float32, rounded once to 8 bits."""
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24), (24,)])
def test_linears(shape, has_bias):
    x, weight, bias = numbers(*shape), numbers(9, 24), numbers(9) if has_bias else None
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None]
    with WidenedProducts():
        y = F.linear(x, weight, bias=bias)
    gradient = torch.randn_like(y)
    doubles = [tensor.detach().double().requires_grad_() for tensor in leaves]
    expected = F.linear(*doubles)
    close(y, expected)
    expected.backward(gradient.double())
    y.backward(gradient)
    for own, other in zip(leaves, doubles):
        close(own.grad, other.grad)


def test_what_is_kept_is_bfloat16():
    kept, q = [], numbers(1, 2, 6, 16)
    with WidenedProducts(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        F.linear(numbers(5, 24), numbers(9, 24))
        F.scaled_dot_product_attention(q, q, q)
    assert [x.dtype for x in kept] == [torch.bfloat16] * 5


def test_matrix_products():
    x, y = numbers(2, 5, 24), numbers(2, 24, 3)
    with WidenedProducts():
        products = x @ y, x.matmul(y), torch.bmm(x, y), torch.matmul(x, y)
    for product in products:
        close(product, x.double() @ y.double())


@pytest.mark.parametrize(
    "options", [dict(is_causal=True), dict(attn_mask=torch.randn(6, 6).bfloat16()), dict(scale=0.5)]
)
def test_attention(options):
    inputs = [numbers(1, heads, 6, 16) for heads in (4, 2, 2)]
    with WidenedProducts():
        y = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **options)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    options = {name: x.double() if name == "attn_mask" else x for name, x in options.items()}
    expected = F.scaled_dot_product_attention(*doubles, enable_gqa=True, **options)
    close(y, expected)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected.backward(gradient.double())
    for own, other in zip(inputs, doubles):
        close(own.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_go_their_way(dtype):
    x, weight = torch.randn(5, 24).to(dtype), torch.randn(9, 24).to(dtype)
    with WidenedProducts():
        assert torch.equal(F.linear(x, weight), F.linear(x, weight)) and F.linear(x, weight).dtype is dtype
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(x, weight.bfloat16())


@pytest.mark.parametrize(
    ("instructions", "has_them"),
    [("avx2", False), ("avx2 avx512", False), ("avx2 avx512_bf16", True), ("avx2 amx_tile", True)],
)
def test_cpus(instructions, has_them, monkeypatch):
    for name in ("avx2", "avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in instructions.split())
    assert multiplies_bfloat16() is has_them
    assert isinstance(widened_products(CPU), WidenedProducts) is not has_them
    assert [type(mode) for mode in fast_training(CPU)] == [FastAttention if has_them else WidenedProducts]
    assert not isinstance(widened_products(torch.device("cuda")), WidenedProducts)
    assert fast_training(torch.device("cuda")) == []
