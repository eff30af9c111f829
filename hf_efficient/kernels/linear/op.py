"""Defines the ops of products with frozen weights: schema, shapes without data, the function of each device,
gradients."""

import functools
from collections.abc import Callable

import torch

from hf_efficient.kernels.replay.cuda_graph import counts_in


_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")


@functools.cache
def triton_kernels():
    """The package efficient_linear, imported late: it needs Triton."""
    from hf_efficient.kernels import efficient_linear

    return efficient_linear


counts_in(lambda buffer: triton_kernels().counters_in(buffer))


def by_name(kernel: str, op: str) -> Callable:
    """The function `kernel` of efficient_linear, to be called with the arguments of `op` in their order."""
    names = [argument.name for argument in _arguments(op)]

    def call(*arguments):
        return getattr(triton_kernels(), kernel)(**dict(zip(names, arguments)))

    return call


def define(
    schema: str,
    *,
    cpu: Callable,
    fake: Callable,
    cuda: Callable | str | None = None,
    takes_mkldnn: bool = False,
    weight: Callable | None = None,
    autograd: tuple[Callable, Callable] | None = None,
) -> None:
    """Defines `torch.ops.hf_efficient.<name>`.

    Args:
        schema: "name(Tensor x, ...) -> Tensor".
        cpu: the function for CPUs, called with all arguments in order, as the others are.
        fake: results of the right shape, dtype and device.
        cuda: the function for CUDA and ROCm, or the name of one in efficient_linear whose arguments have the op's
            names.
        takes_mkldnn: whether `cpu` also takes weights that oneDNN has packed.
        weight: makes y [..., N] = x [..., K] @ W^T + bias differentiable in x, its first argument, and in bias. Called
            as weight(dtype, K, **the other arguments by name), it returns W [N, K] in dtype.
        autograd: (backward, setup_context) of torch.library.register_autograd, for any other gradient.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, cpu, "CPU")
    if takes_mkldnn:
        _LIBRARY.impl(name, cpu, "MkldnnCPU")
    if cuda is not None:
        _LIBRARY.impl(name, by_name(cuda, name) if isinstance(cuda, str) else cuda, "CUDA")
    torch.library.register_fake(f"hf_efficient::{name}", fake, lib=_LIBRARY)
    backward, setup = autograd or (weight and _frozen_weight(name, weight)) or (None, None)
    if backward is not None:
        torch.library.register_autograd(f"hf_efficient::{name}", backward, setup_context=setup, lib=_LIBRARY)


def _arguments(op: str) -> list:
    return getattr(torch.ops.hf_efficient, op).default._schema.arguments


def _frozen_weight(op: str, weight: Callable) -> tuple[Callable, Callable]:
    """(backward, setup_context) of a product whose weight has no gradient; see `define`."""
    names = [argument.name for argument in _arguments(op)]
    is_tensor = ["Tensor" in str(argument.type) for argument in _arguments(op)]
    bias_at = names.index("bias")
    saved = [i for i in range(1, len(names)) if is_tensor[i] and i != bias_at]
    plain = [i for i in range(1, len(names)) if not is_tensor[i]]

    def setup(ctx, inputs, output):
        x, bias = inputs[0], inputs[bias_at]
        ctx.save_for_backward(*(inputs[i] for i in saved))
        ctx.plain = {names[i]: inputs[i] for i in plain}
        ctx.dtype, ctx.in_features, ctx.bias_dtype = x.dtype, x.shape[-1], None if bias is None else bias.dtype

    def backward(ctx, grad):
        for i in saved:
            if ctx.needs_input_grad[i]:
                raise RuntimeError(f"{names[i]} requires grad: gradients are of x and bias, the weight is frozen")
        grads = [None] * len(names)
        if ctx.needs_input_grad[0]:
            tensors = {names[i]: tensor for i, tensor in zip(saved, ctx.saved_tensors)}
            grads[0] = grad @ weight(ctx.dtype, ctx.in_features, **tensors, **ctx.plain)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[bias_at]:
            grads[bias_at] = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return tuple(grads)

    return backward, setup
