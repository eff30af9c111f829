"""Layouts of ternary weights for inputs that are rounded to 8 bits a token (BitNet b1.58, https://arxiv.org/abs/2402.17764).
Nothing here needs Triton on a CPU."""

import importlib

import torch

from hf_efficient.kernels.linear import ternary  # noqa: F401  registers the op
from hf_efficient.kernels.linear.w8a8 import quantize
from hf_efficient.kernels.linear.w8a8_cpu import int8_product, pack_int8, unpack_int8
from hf_efficient.kernels.linear.weight_only import rows_of


class _TernaryLinear:
    """A layout of trits int8 [N, K] times scale float32 [1, 1] or [N, 1] that replaces `qweight`; `pack` (trits -> qweight)
    makes it again."""

    replaces_qweight = True

    def __init__(self, trits, scale, pack, dtype):
        self.out_features, self.in_features = trits.shape
        self.scale, self.pack, self.dtype = scale, pack, dtype
        self.packed = self.of_trits(trits)
        self.tensors = {"packed": self.packed}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, x_scale, _ = quantize(rows_of(x, self.in_features), "int8")
        return self.product(codes, x_scale, bias).view(*x.shape[:-1], self.out_features)

    def dequantize(self) -> torch.Tensor:
        return (self.trits().float() * self.scale).to(self.dtype)

    def qweight(self) -> torch.Tensor:
        return self.pack(self.trits())


class TernaryCpuLinear(_TernaryLinear):
    """A byte a weight in the order of oneDNN's int8 product: of torch's operators the fastest for any number of rows."""

    def of_trits(self, trits):
        return pack_int8(trits)

    def trits(self) -> torch.Tensor:
        return unpack_int8(self.packed).contiguous()

    def product(self, codes, x_scale, bias):
        return int8_product(codes, self.packed, x_scale, self.scale, bias, None, None, None, self.dtype)


class TernaryTritonLinear(_TernaryLinear):
    """Two bits a weight, for the Triton kernel (CUDA, ROCm)."""

    def of_trits(self, trits):
        return _packing().pack_ternary(trits)

    def trits(self) -> torch.Tensor:
        return _packing().unpack_ternary(self.packed, self.out_features, self.in_features)

    def product(self, codes, x_scale, bias):
        return torch.ops.hf_efficient.ternary_linear(
            codes, self.packed, x_scale, self.scale.flatten(), bias, self.out_features, self.dtype
        )


def _packing():
    return importlib.import_module("hf_efficient.kernels.efficient_linear.ternary_packing")


def ternary_layout(trits: torch.Tensor, scale: torch.Tensor, pack, dtype: torch.dtype):
    """The layout of trits int8 [N, K] times scale float32 [1, 1] or [N, 1], on the device they are on; None where there is no
    such product. `pack` turns trits into the canonical qweight."""
    kinds = {"cuda": TernaryTritonLinear, "cpu": TernaryCpuLinear}
    return kinds[trits.device.type](trits, scale, pack, dtype) if trits.device.type in kinds else None
