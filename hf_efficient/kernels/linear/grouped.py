"""Products with the weights of several experts at once: the op, and the layout that a GPU reads."""

import importlib

import torch

from hf_efficient.kernels.linear.weight_only import TritonLinear, dequantize_packed, rows_of, triton_groups


def _kernels():
    return importlib.import_module("hf_efficient.kernels.efficient_linear.grouped")


class GroupedTritonLinear:
    """The weights of all experts, stacked in the layout of the Triton kernels. `experts` are the same weights one by one:
    `TritonLinear` over the same memory."""

    replaces_qweight = True

    def __init__(self, qweight, scale, zero_point, *, bits, group_size, in_features, dtype):
        """From the canonical tensors of all experts: [E, N, ...] each (scale [E, 1, 1] for group_size None)."""
        scale, zero_point, group_size = triton_groups(scale, zero_point, group_size, in_features)
        pack = importlib.import_module("hf_efficient.kernels.efficient_linear").pack_weight
        self.packed = torch.stack([pack(part, bits, group_size) for part in qweight])
        self.scale, self.zero_point, self.dtype = scale, zero_point, dtype
        self.tensors = {"packed": self.packed}
        self.layout = (bits, group_size, in_features)
        zeros = [None] * len(scale) if zero_point is None else zero_point
        self.experts = [TritonLinear(*tensors, *self.layout, dtype) for tensors in zip(self.packed, scale.data, zeros)]

    @staticmethod
    def supports(device: torch.device, group_size, dtype) -> bool:
        return device.type == "cuda" and TritonLinear.supports(group_size, dtype)

    def __call__(self, x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [R, K], rows offsets[e] .. offsets[e + 1] (int32 [E + 1]) belong to expert e; bias [E, N] -> [R, N]."""
        return torch.ops.hf_efficient.grouped_linear(
            rows_of(x, self.layout[2]), self.packed, self.scale, self.zero_point, bias, offsets, *self.layout
        )

    def qweight(self) -> torch.Tensor:
        """The canonical qweight of all experts."""
        return torch.stack([expert.qweight() for expert in self.experts])


_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "grouped_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, Tensor offsets, int bits, "
    "int? group_size, int in_features) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _triton(x, packed, scale, zero_point, bias, offsets, bits, group_size, in_features):
    arguments = dict(offsets=offsets, bits=bits, group_size=group_size, in_features=in_features)
    return _kernels().grouped_linear(x, packed, scale, zero_point, bias, **arguments)


def _reference(x, packed, scale, zero_point, bias, offsets, bits, group_size, in_features):
    arguments = dict(offsets=offsets, bits=bits, group_size=group_size, in_features=in_features)
    return _kernels().grouped_linear_reference(x, packed, scale, zero_point, bias, **arguments).to(x.dtype)


_library.impl("grouped_linear", _triton, "CUDA")
_library.impl("grouped_linear", _reference, "CPU")


@torch.library.register_fake("hf_efficient::grouped_linear", lib=_library)
def _fake(x, packed, scale, zero_point, bias, offsets, bits, group_size, in_features):
    return x.new_empty(x.shape[0], packed.shape[1])


def _setup(ctx, inputs, output):
    x, packed, scale, zero_point, bias, offsets, *layout = inputs
    ctx.save_for_backward(packed, scale, zero_point, offsets)
    ctx.layout = dict(zip(("bits", "group_size", "in_features"), layout))
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _backward(ctx, grad):
    """One expert at a time; the offsets are read back."""
    packed, scale, zero_point, offsets = ctx.saved_tensors
    x_dtype, bias_dtype = ctx.dtypes
    grad_x = grad.new_zeros(len(grad), ctx.layout["in_features"], dtype=x_dtype)
    grad_bias = None if bias_dtype is None else grad.new_zeros(packed.shape[:2], dtype=bias_dtype)
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:])):
        if first < last:
            zero = None if zero_point is None else zero_point[expert]
            weight = dequantize_packed(packed[expert], scale[expert], zero, x_dtype, **ctx.layout)
            grad_x[first:last] = grad[first:last] @ weight
            if grad_bias is not None:
                grad_bias[expert] = grad[first:last].sum(0)
    return grad_x, None, None, None, grad_bias, None, None, None, None


torch.library.register_autograd("hf_efficient::grouped_linear", _backward, setup_context=_setup, lib=_library)
