"""Products of bfloat16 matrices on CPUs that have no instructions for them: in float32, rounded once.

There torch's bfloat16 products take 4 to 5 times as long as its float32 products (AVX-512), or 100 times (AVX2)."""

import contextlib

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


_MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm}


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16. torch's own answer is yes for any AVX-512."""
    if torch.cpu._is_avx2_supported():
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widened_products(device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, products of bfloat16 on the CPU are those of `WidenedProducts`, if `device` is a CPU that needs it."""
    return WidenedProducts() if device.type == "cpu" and not multiplies_bfloat16() else contextlib.nullcontext()


def computed(operator: torch._ops.OpOverload, args: tuple, kwargs: dict):
    """What `operator` gives, products of bfloat16 matrices on a CPU that needs it by `WidenedProducts`' way."""
    if operator in _MATRIX_PRODUCTS and not kwargs and _are_bfloat16(args) and not multiplies_bfloat16():
        return operator(*map(_widened, args)).to(torch.bfloat16)
    return operator(*args, **kwargs)


class WidenedProducts(TorchFunctionMode):
    """Inside, linears, matrix products and `scaled_dot_product_attention` of bfloat16 tensors on a CPU are computed in
    float32 and rounded at the end, as the instructions for bfloat16 do. What linears and attention keep for the
    backward pass stays bfloat16: the latter is computed again."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and _are_bfloat16(_tensors(args, kwargs)):
            return _linear(*args, **kwargs)
        if function in _PRODUCTS and _are_bfloat16(_tensors(args, kwargs)) and "out" not in kwargs:
            return function(*map(_widened, args), **kwargs).to(torch.bfloat16)
        if function is F.scaled_dot_product_attention and len(args) >= 3 and _are_bfloat16(args[:3]):
            attention = _Attention(*args[3:], **kwargs)
            if attention.gives_the_same_twice:
                return WidenedAttention.apply(*args[:3], attention)
        return function(*args, **kwargs)


def _linear(input, weight, bias=None):
    return WidenedLinear.apply(input, weight, bias)


def _tensors(args, kwargs) -> list[torch.Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]


def _are_bfloat16(tensors) -> bool:
    """Subclasses, whose weights may be codes, go their own way."""
    plain = torch.Tensor, torch.nn.Parameter
    return all(type(x) in plain and x.dtype is torch.bfloat16 and x.device.type == "cpu" for x in tensors)


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


class _Attention:
    """A call of `scaled_dot_product_attention` but for q, k and v."""

    def __init__(self, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        self.mask, self.is_causal, self.kwargs = _widened(attn_mask), is_causal, kwargs
        learns = self.mask is not None and self.mask.requires_grad
        self.gives_the_same_twice = not dropout_p and not learns

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        inputs = map(_widened, inputs)
        return F.scaled_dot_product_attention(*inputs, self.mask, is_causal=self.is_causal, **self.kwargs)


class WidenedAttention(torch.autograd.Function):
    """q, k and v in bfloat16, an `_Attention` -> its output in bfloat16."""

    @staticmethod
    def forward(ctx, q, k, v, attention):
        ctx.save_for_backward(q, k, v)
        ctx.attention = attention
        return attention(q, k, v).to(q.dtype)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.attention(*inputs)
        return *(x.to(gradient.dtype) for x in torch.autograd.grad(output, inputs, gradient.float())), None
