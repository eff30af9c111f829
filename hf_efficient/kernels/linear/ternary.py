"""Products with ternary weights and inputs that are rounded to 8 bits a token (BitNet b1.58,
https://arxiv.org/abs/2402.17764): the op, and its layouts. A CPU needs no Triton."""

from collections.abc import Callable

import torch

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.layout import Layout, RowsLayout
from hf_efficient.kernels.linear.native_rounded import NativeRoundedLayout
from hf_efficient.kernels.linear.w8a8 import quantize
from hf_efficient.kernels.linear.w8a8_cpu import int8_product, pack_int8, sums_of_products, unpack_int8


class _TernaryLayout(RowsLayout):
    """A weight of trits int8 [N, K] times scale float32 [1, 1] or [N, 1].

    pack: makes the canonical qweight of the trits. A subclass has `of_trits`, the stored tensor; `trits`, its inverse;
    and `codes_product` of int8 rows [M, K], their scales [M, 1] and a bias.
    """

    def __init__(self, trits, scale, pack, dtype):
        self.out_features, self.in_features = trits.shape
        self.scale, self.pack, self.dtype = scale, pack, dtype
        self.packed = self.of_trits(trits)
        self.tensors = {"packed": self.packed}

    def product(self, x, bias):
        codes, x_scale, _ = quantize(x, "int8")
        return self.codes_product(codes, x_scale, bias)

    def dequantize(self):
        return (self.trits().float() * self.scale).to(self.dtype)

    def canonical(self):
        return self.pack(self.trits())


class TernaryCpuLayout(_TernaryLayout):
    """A byte a weight in the order of oneDNN's int8 product, the fastest of torch's operators for any number of
    rows."""

    def of_trits(self, trits):
        return pack_int8(trits)

    def trits(self) -> torch.Tensor:
        return unpack_int8(self.packed).contiguous()

    def codes_product(self, codes, x_scale, bias):
        return int8_product(codes, self.packed, x_scale, self.scale, bias, None, None, None, self.dtype)


class NativeTernaryLayout(Layout):
    """Two bits a weight, for the C++ kernels of a CPU. `pack` makes the canonical qweight of the trits."""

    def __init__(self, native: NativeRoundedLayout, pack: Callable, dtype):
        self.native, self.pack, self.dtype, self.tensors = native, pack, dtype, native.tensors
        self.matmul, self.dequantize = native.matmul, native.dequantize

    @property
    def native_product(self):
        return self.native

    def canonical(self):
        return self.pack(self.native.numbers(1))


class TernaryTritonLayout(_TernaryLayout):
    """Two bits a weight, for the Triton kernel (CUDA, ROCm)."""

    def of_trits(self, trits):
        return op.triton_kernels().pack_ternary(trits)

    def trits(self) -> torch.Tensor:
        return op.triton_kernels().unpack_ternary(self.packed, self.out_features, self.in_features)

    def codes_product(self, codes, x_scale, bias):
        tensors = codes, self.packed, x_scale, self.scale.flatten(), bias
        return torch.ops.hf_efficient.ternary_linear(*tensors, self.out_features, self.dtype)


def ternary_layout(trits: torch.Tensor, scale: torch.Tensor, pack: Callable, dtype: torch.dtype) -> Layout | None:
    """The layout of trits int8 [N, K] times scale float32 [1, 1] or [N, 1] on the device they are on; None where there
    is no such product. `pack` makes the canonical qweight of the trits."""
    if native := NativeRoundedLayout.pack(trits, 1, scale, None, dtype, bits=2):
        return NativeTernaryLayout(native, pack, dtype)
    if trits.device.type == "cpu":
        return TernaryCpuLayout(trits, scale, pack, dtype)
    return TernaryTritonLayout(trits, scale, pack, dtype) if triton_devices.serves(trits.device) else None


def _cpu(x_codes, packed, x_scale, w_scale, bias, out_features, out_dtype):
    trits = op.triton_kernels().unpack_ternary(packed, out_features, x_codes.shape[1])
    y = sums_of_products(x_codes.contiguous(), trits).float()
    y = y.mul_(x_scale.reshape(-1, 1)).mul_(w_scale.reshape(1, -1))
    return (y if bias is None else y.add_(bias.float())).to(out_dtype)


op.define(
    "ternary_linear(Tensor x_codes, Tensor packed, Tensor x_scale, Tensor w_scale, Tensor? bias, int out_features, "
    "ScalarType out_dtype) -> Tensor",
    cpu=_cpu,
    cuda="ternary_linear",
    fake=lambda x, packed, x_scale, w_scale, bias, out_features, dtype: x.new_empty(len(x), out_features, dtype=dtype),
)
