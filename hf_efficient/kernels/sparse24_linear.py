"""The op of 2:4 sparse weights: Triton on a GPU, expansion and an ordinary product elsewhere. Differentiable in x and
bias."""

import importlib

import torch


def _kernels():
    return importlib.import_module("hf_efficient.kernels.efficient_linear.sparse24")


_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "sparse24_linear(Tensor x, Tensor values, Tensor places, Tensor? scale, Tensor? zero_point, Tensor? bias, "
    "int? group_size, int out_features, int in_features) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _triton(x, values, places, scale, zero_point, bias, group_size, out_features, in_features):
    layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
    return _kernels().sparse24_linear(x, values, places, scale, zero_point, bias, **layout)


def _cpu(x, values, places, scale, zero_point, bias, group_size, out_features, in_features):
    layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
    weight = _kernels().dequantize_sparse24(values, places, scale, zero_point, **layout, dtype=x.dtype)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


_library.impl("sparse24_linear", _triton, "CUDA")
_library.impl("sparse24_linear", _cpu, "CPU")


@torch.library.register_fake("hf_efficient::sparse24_linear", lib=_library)
def _fake(x, values, places, scale, zero_point, bias, group_size, out_features, in_features):
    return x.new_empty(x.shape[0], out_features)


def _setup(ctx, inputs, output):
    x, values, places, scale, zero_point, bias, *layout = inputs
    ctx.save_for_backward(values, places, scale, zero_point)
    ctx.layout = dict(zip(("group_size", "out_features", "in_features"), layout))
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _backward(ctx, grad):
    x_dtype, bias_dtype = ctx.dtypes
    weight = _kernels().dequantize_sparse24(*ctx.saved_tensors, **ctx.layout, dtype=x_dtype)
    grad_bias = None if bias_dtype is None else grad.sum(0).to(bias_dtype)
    return grad @ weight, None, None, None, None, grad_bias, None, None, None


torch.library.register_autograd("hf_efficient::sparse24_linear", _backward, setup_context=_setup, lib=_library)
