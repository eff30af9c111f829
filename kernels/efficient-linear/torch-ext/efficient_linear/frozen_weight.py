"""Gradients of products with frozen weights, with respect to the input and the bias."""

import torch


def needs_gradient(x: torch.Tensor, bias: torch.Tensor | None, **frozen: torch.Tensor | None) -> bool:
    """Whether x or bias needs a gradient.

    Raises:
        RuntimeError: one of the tensors `frozen` requires grad while grad is enabled.
    """
    if not torch.is_grad_enabled():
        return False
    for name, tensor in frozen.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(f"{name} requires grad: allowed are gradients of x and bias, the weight is frozen")
    return x.requires_grad or (bias is not None and bias.requires_grad)


class FrozenWeightProduct(torch.autograd.Function):
    """product(x, bias, *tensors, **options) = x [M, K] @ W^T + bias, where weight(*tensors, dtype, **options) is W [N,
    K]."""

    @staticmethod
    def forward(ctx, x, bias, product, weight, tensors, options):
        ctx.save_for_backward(*tensors)
        ctx.weight, ctx.options, ctx.dtypes = weight, options, (x.dtype, None if bias is None else bias.dtype)
        return product(x, bias, *tensors, **options)

    @staticmethod
    def backward(ctx, grad):
        x_dtype, bias_dtype = ctx.dtypes
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.weight(*ctx.saved_tensors, x_dtype, **ctx.options)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.sum(0).to(bias_dtype)
        return grad_x, grad_bias, None, None, None, None
