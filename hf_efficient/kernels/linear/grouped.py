"""Products with the weights of several experts at once: the op, and the layout that a GPU reads."""

import torch

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.layout import Layout, rows_of, triton_groups
from hf_efficient.kernels.linear.weight_only import TritonLayout, dequantize_packed


class GroupedTritonLayout(Layout):
    """The weights of all experts, stacked in the layout of the Triton kernels. experts: the same weights one by one, a
    `TritonLayout` each over the same memory."""

    def __init__(self, qweight, scale, zero_point, *, bits, group_size, in_features, dtype):
        """From the canonical tensors of all experts: [E, N, ...] each (scale [E, 1, 1] for group_size None)."""
        scale, zero_point, group_size = triton_groups(scale, zero_point, group_size, in_features)
        pack = op.triton_kernels().pack_weight
        self.packed = torch.stack([pack(part, bits, group_size) for part in qweight])
        self.scale, self.zero_point, self.dtype = scale, zero_point, dtype
        self.tensors, self.in_features = {"packed": self.packed}, in_features
        self.scheme = (bits, group_size, in_features)
        zeros = [None] * len(scale) if zero_point is None else zero_point
        self.experts = [TritonLayout(*tensors, *self.scheme, dtype) for tensors in zip(self.packed, scale.data, zeros)]

    @staticmethod
    def supports(device: torch.device, group_size, dtype) -> bool:
        return TritonLayout.supports(group_size, dtype) and triton_devices.serves(device)

    def matmul(self, x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [R, K], whose rows offsets[e] to offsets[e + 1] (int32 [E + 1]) belong to expert e; bias [E, N] -> [R,
        N]."""
        tensors = rows_of(x, self.in_features), self.packed, self.scale, self.zero_point, bias, offsets
        return torch.ops.hf_efficient.grouped_linear(*tensors, *self.scheme)

    def canonical(self):
        """The canonical qweight of all experts."""
        return torch.stack([expert.canonical() for expert in self.experts])


def _reference(*arguments):
    return op.by_name("grouped_linear_reference", "grouped_linear")(*arguments).to(arguments[0].dtype)


def _setup(ctx, inputs, output):
    x, packed, scale, zero_point, bias, offsets, *scheme = inputs
    ctx.save_for_backward(packed, scale, zero_point, offsets)
    ctx.scheme = dict(zip(("bits", "group_size", "in_features"), scheme))
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _backward(ctx, grad):
    """One expert at a time; the offsets are read back."""
    packed, scale, zero_point, offsets = ctx.saved_tensors
    x_dtype, bias_dtype = ctx.dtypes
    grad_x = grad.new_zeros(len(grad), ctx.scheme["in_features"], dtype=x_dtype)
    grad_bias = None if bias_dtype is None else grad.new_zeros(packed.shape[:2], dtype=bias_dtype)
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:])):
        if first < last:
            zero = None if zero_point is None else zero_point[expert]
            weight = dequantize_packed(packed[expert], scale[expert], zero, x_dtype, **ctx.scheme)
            grad_x[first:last] = grad[first:last] @ weight
            if grad_bias is not None:
                grad_bias[expert] = grad[first:last].sum(0)
    return grad_x, None, None, None, grad_bias, None, None, None, None


op.define(
    "grouped_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, Tensor offsets, int bits, "
    "int? group_size, int in_features) -> Tensor",
    cpu=_reference,
    cuda="grouped_linear",
    fake=lambda x, packed, *_: x.new_empty(x.shape[0], packed.shape[1]),
    autograd=(_backward, _setup),
)
