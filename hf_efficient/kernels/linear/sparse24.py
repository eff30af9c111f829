"""The op of 2:4 sparse weights, and the layout that calls it: Triton on a GPU, expansion and an ordinary product elsewhere.
Differentiable in x and bias."""

import importlib

import torch

from hf_efficient.kernels.linear.weight_only import rows_of


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


class Sparse24TritonLinear:
    """The layout of the Triton kernels (CUDA, ROCm), of which the canonical scales are a part."""

    replaces_qweight = True

    def __init__(self, values, places, scale, zero_point, group_size, out_features, in_features, dtype):
        self.values, self.places, self.scale, self.zero_point = values, places, scale, zero_point
        self.layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.tensors = {"packed": values, "packed_places": places}

    @classmethod
    def pack(cls, values, mask, scale=None, zero_point=None, group_size=None, *, dtype):
        """From the weight or its 4-bit codes [N, K] and what of it is kept, bool alike, exactly two of four; None where the
        kernels do not serve it."""
        floats = torch.float16, torch.bfloat16, torch.float32
        served = values.dtype is dtype if scale is None else group_size == -1 or (group_size and group_size % 64 == 0)
        if dtype not in floats or not served:
            return None
        packing = importlib.import_module("hf_efficient.kernels.efficient_linear.sparse24_packing")
        pack = packing.pack_sparse24 if scale is None else packing.pack_sparse24_codes
        return cls(*pack(values, kept=mask), scale, zero_point, group_size, *values.shape, dtype)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        tensors = rows_of(x, self.in_features), self.values, self.places, self.scale, self.zero_point, bias
        y = torch.ops.hf_efficient.sparse24_linear(*tensors, *self.layout.values())
        return y.view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K]."""
        tensors = self.values, self.places, self.scale, self.zero_point
        return _kernels().dequantize_sparse24(*tensors, **self.layout, dtype=self.dtype)

    def kept(self) -> torch.Tensor:
        """The kept values or codes [N, K / 2]."""
        packing = importlib.import_module("hf_efficient.kernels.efficient_linear.sparse24_packing")
        weight, stored = packing.unpack_sparse24(self.values, self.places, self.out_features, self.in_features)
        return weight[stored].view(self.out_features, -1)
