"""Subclasses of `nn.Linear` that compute what it computes, but round once more before the bias is added (Falcon)."""

import functools

import torch
from torch import nn


_OWN = {"__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__", "forward"}


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is an `nn.Linear` or of a class that `adds_bias_apart`."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and adds_bias_apart(type(module)))


@functools.cache
@torch.no_grad()
def adds_bias_apart(cls: type) -> bool:
    """Whether the class, which derives from `nn.Linear`, changes only its forward, and this to `x @ W^T` rounded to the dtype of
    x, plus the bias: the same bits as that on random bfloat16 numbers, other bits than those of `nn.Linear`."""
    if cls.__bases__ != (nn.Linear,) or "forward" not in vars(cls) or not vars(cls).keys() <= _OWN:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device="cpu").bfloat16() for shape in ((64, 32), (16, 32), (16,))
    )
    with torch.random.fork_rng(devices=[]):
        layers = [cls(32, 16, has_bias, device="cpu", dtype=torch.bfloat16) for has_bias in (True, False)]
    for layer in layers:
        layer.weight.copy_(weight)
    layers[0].bias.copy_(bias)
    product = x @ weight.T
    try:
        found = [layer(x) for layer in layers]
    except Exception:  # of a class that is called in another way
        return False
    return torch.equal(found[0], product + bias) and torch.equal(found[1], product)
