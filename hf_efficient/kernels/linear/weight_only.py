"""Products with a weight of integer codes: the op, the layouts of the Triton kernels, and which layout a device gets.

The canonical tensors (what is saved) of a weight [N, K] in `bits` bits (2, 3, 4, 8) are `qweight` uint8 (see `codes`),
`scale` [N, G] and `zero_point` uint8 [N, G], or None for the middle of the grid: `w = (code - zero_point) * scale`. G
is ceil(K / group_size), 1 for group_size -1; both are [1, 1] for group_size None. A layout also takes zero points in
float32.
"""

import torch
import torch.nn.functional as F

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.codes import expand_groups, unpack_codes
from hf_efficient.kernels.linear.layout import Layout, TritonRowsLayout, triton_groups
from hf_efficient.kernels.linear.native_cpu import WIDE, NativeCodesLayout
from hf_efficient.kernels.linear.torch_cpu import Int4CpuLayout, Int8CpuLayout


def dequantize_weight(
    qweight, scale, zero_point=None, minimum=None, *, bits, group_size, in_features, dtype
) -> torch.Tensor:
    """Canonical tensors (with any leading dimensions) -> the weight [..., N, in_features] in `dtype`, in which it is
    computed; with `minimum`, code * scale + minimum."""
    weight = unpack_codes(qweight, bits, in_features).to(dtype)  # codes up to 255 are exact in bfloat16
    if minimum is not None:
        weight = weight.mul_(expand_groups(scale.to(dtype), group_size, in_features))
        return weight.add_(expand_groups(minimum.to(dtype), group_size, in_features))
    zero = 2 ** (bits - 1) if zero_point is None else expand_groups(zero_point, group_size, in_features).to(dtype)
    return weight.sub_(zero).mul_(expand_groups(scale.to(dtype), group_size, in_features))


def dequantize_packed(packed, scale, zero_point, dtype, **scheme) -> torch.Tensor:
    """What `pack_weight` packed -> the weight [N, K], computed in float32 and rounded once to `dtype`. scheme: bits,
    group_size, in_features."""
    kernels = op.triton_kernels()
    if packed.is_cuda:
        return kernels.dequantize(packed, scale, zero_point, dtype=dtype, **scheme)
    return kernels.dequantize_reference(packed, scale, zero_point, **scheme).to(dtype)


class TritonLayout(TritonRowsLayout):
    """The layout of the Triton kernels, which take any number of rows."""

    def __init__(self, packed, scale, zero_point, bits, group_size, in_features, dtype):
        self.out_features, self.in_features, self.dtype = packed.shape[0], in_features, dtype
        self.bits, self.group_size, self.scale, self.zero_point = bits, group_size, scale, zero_point
        self.packed = packed
        self.tensors = {"packed": packed}

    @classmethod
    def pack(cls, qweight, scale, zero_point, bits, group_size, in_features, dtype) -> "TritonLayout":
        """From canonical tensors."""
        scale, zero_point, group_size = triton_groups(scale, zero_point, group_size, in_features)
        packed = op.triton_kernels().pack_weight(qweight, bits, group_size)
        return cls(packed, scale, zero_point, bits, group_size, in_features, dtype)

    def product(self, x, bias):
        tensors = x, self.packed, self.scale, self.zero_point, bias
        return torch.ops.hf_efficient.weight_only_linear(*tensors, self.bits, self.group_size, self.in_features)

    def dequantize(self):
        return dequantize_packed(self.packed, self.scale, self.zero_point, self.dtype, **self.scheme)

    def canonical(self):
        return op.triton_kernels().unpack_weight(self.packed, self.in_features, self.bits, self.group_size)

    def canonical_rows(self, ids):
        """Unpacks the tiles that hold them."""
        tile = op.triton_kernels().packing.ROWS
        tiles = -(-self.out_features // tile)
        words = self.packed.flatten()
        words = words[: words.numel() // (tiles * tile) * tiles * tile].view(tiles, -1)[ids // tile]
        found = op.triton_kernels().unpack_weight(
            words.view(len(ids) * tile, -1), self.in_features, self.bits, self.group_size
        )
        return found.view(len(ids), tile, -1)[torch.arange(len(ids), device=ids.device), ids % tile]


class FloatZeroTritonLayout(Layout):
    """`TritonLayout` around the middle of the grid, plus what zero points in float32 add: the sums of x over each group
    times (middle - zero_point) * scale, a product with 1 / group_size of the weight's columns."""

    def __init__(self, qweight, scale, zero_point, bits, group_size, in_features, dtype):
        self.inner = TritonLayout.pack(qweight, scale, None, bits, group_size, in_features, dtype)
        self.in_features, self.dtype = in_features, dtype
        self.width = in_features if group_size in (None, -1) else group_size
        shift = (2 ** (bits - 1) - zero_point) * scale.float()
        self.shift = shift.expand(len(qweight), -1).t().contiguous()  # [G, N]
        self.tensors = {**self.inner.tensors, "packed_shift": self.shift}
        self.canonical = self.inner.canonical

    def matmul(self, x, bias=None):
        y = self.inner.matmul(x, bias)
        sums = F.pad(x.float(), (0, -self.in_features % self.width)).unflatten(-1, (-1, self.width)).sum(-1)
        return y + (sums @ self.shift).to(y.dtype)

    def dequantize(self):
        shift = self.shift.t().repeat_interleave(self.width, 1)[:, : self.in_features]
        return (self.inner.dequantize().float() + shift).to(self.dtype)


def device_layout(
    qweight, scale, zero_point, *, bits, group_size, in_features, dtype, int8_on_cpu=False
) -> Layout | None:
    """The fastest layout for inputs of `dtype` on the device of `qweight`; None where no kernel reads these codes.
    int8_on_cpu: whether bfloat16 inputs are rounded to int8 on a CPU: True, False, or "auto" where that is faster."""
    scheme = bits, group_size, in_features, dtype
    if TritonLayout.supports(group_size, dtype) and triton_devices.serves(qweight.device):
        if zero_point is not None and zero_point.is_floating_point():
            return FloatZeroTritonLayout(qweight, scale, zero_point, *scheme)
        return TritonLayout.pack(qweight, scale, zero_point, *scheme)
    if qweight.device.type == "cpu":
        rounds_inputs = WIDE if int8_on_cpu == "auto" else int(int8_on_cpu)
        native = NativeCodesLayout.pack(qweight, scale, zero_point, *scheme, rounds_inputs)
        if native is not None:
            return native
        if bits == 8 and Int8CpuLayout.supports(len(qweight), in_features, group_size, dtype):
            return Int8CpuLayout(qweight, scale, zero_point, dtype)
        if Int4CpuLayout.supports(len(qweight), in_features, group_size, dtype):
            return Int4CpuLayout(qweight, scale, zero_point, *scheme)
    return None


def _reference(*arguments):
    return op.by_name("weight_only_linear_reference", "weight_only_linear")(*arguments).to(arguments[0].dtype)


op.define(
    "weight_only_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, int bits, "
    "int? group_size, int in_features) -> Tensor",
    cpu=_reference,
    cuda="weight_only_linear",
    fake=lambda x, packed, *_: x.new_empty(x.shape[0], packed.shape[0]),
    weight=lambda dtype, _, packed, scale, zero_point, **scheme: dequantize_packed(
        packed, scale, zero_point, dtype, **scheme
    ),
)
