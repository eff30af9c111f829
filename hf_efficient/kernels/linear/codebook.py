"""The op of weights that are entries of a codebook (NF4, FP4, k-means): Triton on a GPU, look-up and an ordinary product
elsewhere. Differentiable in x and bias."""

import importlib

import torch


def _kernels(module: str):
    return importlib.import_module(f"hf_efficient.kernels.efficient_linear.{module}")


_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "codebook_linear(Tensor x, Tensor packed, Tensor codebook, Tensor scale, Tensor? bias, int bits, int? group_size, "
    "int in_features) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _triton(x, packed, codebook, scale, bias, bits, group_size, in_features):
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _kernels("codebook").codebook_linear(x, packed, codebook, scale, bias, **layout)


def _cpu(x, packed, codebook, scale, bias, bits, group_size, in_features):
    weight = dequantize_packed(packed, codebook, scale, x.dtype, bits, group_size, in_features)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def dequantize_packed(packed, codebook, scale, dtype, bits, group_size, in_features) -> torch.Tensor:
    """What `pack_codebook_weight` packed -> the weight [N, K] in `dtype`; the entries are rounded to it first."""
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    if packed.is_cuda:
        return _kernels("codebook").dequantize_codebook(packed, codebook, scale, dtype=dtype, **layout)
    dequantize = _kernels("reference").dequantize_codebook_reference
    return dequantize(packed, codebook.to(dtype), scale, **layout).to(dtype)


_library.impl("codebook_linear", _triton, "CUDA")
_library.impl("codebook_linear", _cpu, "CPU")


@torch.library.register_fake("hf_efficient::codebook_linear", lib=_library)
def _fake(x, packed, codebook, scale, bias, bits, group_size, in_features):
    return x.new_empty(x.shape[0], packed.shape[0])


def _setup(ctx, inputs, output):
    x, packed, codebook, scale, bias, *layout = inputs
    ctx.save_for_backward(packed, codebook, scale)
    ctx.layout, ctx.dtypes = layout, (x.dtype, None if bias is None else bias.dtype)


def _backward(ctx, grad):
    x_dtype, bias_dtype = ctx.dtypes
    grad_x = grad @ dequantize_packed(*ctx.saved_tensors, x_dtype, *ctx.layout)
    grad_bias = None if bias_dtype is None else grad.sum(0).to(bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, None


torch.library.register_autograd("hf_efficient::codebook_linear", _backward, setup_context=_setup, lib=_library)
