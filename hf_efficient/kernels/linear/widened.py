"""Products of bfloat16 matrices on CPUs that have no instructions for them: in float32, rounded once.

torch has none either there, and takes 4 to 5 times as long as for float32 (AVX-512), or 100 times (AVX2)."""

import contextlib

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_efficient.kernels.attention.products import FastAttention
from hf_efficient.kernels.native import tiers


_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}


def widened_products(device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, products of bfloat16 on the CPU are those of `WidenedProducts`, if `device` is a CPU that needs it."""
    return WidenedProducts() if device.type == "cpu" and not tiers.multiplies_bfloat16() else contextlib.nullcontext()


def fast_training(device: torch.device) -> list[TorchFunctionMode]:
    """The modes inside which a model in bfloat16 trains fast on `device`."""
    if device.type != "cpu":
        return []
    return [FastAttention() if tiers.multiplies_bfloat16() else WidenedProducts()]


class WidenedProducts(TorchFunctionMode):
    """Inside, linears, matrix products and `scaled_dot_product_attention` of bfloat16 tensors on a CPU are computed in
    float32 and rounded at the end, as the instructions for bfloat16 do. What linears keep for the backward pass stays
    bfloat16."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if function is F.linear and _are_bfloat16(tensors):
            return _linear(*args, **kwargs)
        if function in _PRODUCTS and _are_bfloat16(tensors) and "out" not in kwargs:
            return function(*map(_widened, args), **kwargs).to(torch.bfloat16)
        if function is F.scaled_dot_product_attention and _are_bfloat16(tensors[:3]):
            named = {name: _widened(x) for name, x in kwargs.items()}
            return function(*map(_widened, args), **named).to(torch.bfloat16)
        return function(*args, **kwargs)


def _linear(input, weight, bias=None):
    return WidenedLinear.apply(input, weight, bias)


def _are_bfloat16(tensors) -> bool:
    return all(x.dtype is torch.bfloat16 and x.device.type == "cpu" for x in tensors)


def _widened(x):
    return x.float() if isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 else x


class WidenedLinear(torch.autograd.Function):
    """x [..., K], weight [N, K], bias [N] or None, all bfloat16 -> [..., N]."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), _widened(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        needed, gradient = ctx.needs_input_grad, gradient.float()
        rows = gradient.reshape(-1, len(weight))
        of_x = (gradient @ weight.float()).to(x.dtype) if needed[0] else None
        of_weight = (rows.t() @ x.float().reshape(-1, weight.shape[1])).to(weight.dtype) if needed[1] else None
        return of_x, of_weight, rows.sum(0).to(weight.dtype) if needed[2] else None
