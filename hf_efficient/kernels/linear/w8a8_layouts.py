"""Layouts of 8-bit weights that round their inputs to 8 bits in each call, for the products of `w8a8`."""

from collections.abc import Callable
from functools import partial

import torch

from hf_efficient.kernels.linear import w8a8_cpu
from hf_efficient.kernels.linear.layout import Layout
from hf_efficient.kernels.linear.native_rounded import NativeRoundedLayout
from hf_efficient.kernels.linear.native_tables import NativeFloat8Layout
from hf_efficient.kernels.linear.w8a8 import llm_int8_linear, pack_int8, quantized_linear, unpack_int8


_OFFSET = 128  # of the unsigned codes of the C++ kernels from int8


def int8_layout(tensors: dict[str, torch.Tensor], dtype: torch.dtype, format: str, threshold: float | None) -> Layout:
    """The fastest layout of int8 codes for inputs of `dtype` in `format`, or with columns that are not rounded by
    `threshold`. Raises ValueError for so many columns that sums may exceed int32."""
    w8a8_cpu.check_columns(tensors["qweight"].shape[1], format == "int8_asymmetric", "zero_point" in tensors)
    static = {
        name: tensors.get(f"activation_{part}") for name, part in (("x_scale", "scale"), ("x_zero", "zero_point"))
    }
    how = {"asymmetric": format == "int8_asymmetric", "threshold": threshold or 0.0, **static}
    weight = tensors["qweight"], _OFFSET, tensors["scale"], tensors.get("zero_point")
    if native := NativeRoundedLayout.pack(*weight, dtype, **how):
        return NativeInputsLayout(native, partial(native.numbers, _OFFSET), tensors, dtype)
    return Int8Layout(tensors, dtype, format) if threshold is None else LlmInt8Layout(tensors, dtype, threshold)


def float8_layout(tensors: dict[str, torch.Tensor], dtype: torch.dtype, by_block: bool) -> Layout:
    """The fastest layout of float8 codes for inputs of `dtype`; by_block: with scales of 128 x 128, and inputs
    with a scale for 128 columns."""
    weight = tensors["qweight"], tensors["scale"], tensors.get("activation_scale")
    if native := NativeFloat8Layout.pack(*weight, dtype, by_block):
        return NativeInputsLayout(native, native.canonical, tensors, dtype)
    return Float8Layout(tensors, dtype, "fp8_block" if by_block else "fp8")


class _QuantizedInputsLayout(Layout):
    """Computes from the canonical tensors. Columns that are stored unrounded ("outlier_columns") are multiplied
    apart."""

    replaces_qweight = False

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
        self.canonical_tensors, self.dtype, self.tensors = tensors, dtype, {}
        self.codes, self.scale = tensors["qweight"], tensors["scale"]
        self.columns = self.outlier_weight = None
        if "outlier_columns" in tensors:
            self.columns = tensors["outlier_columns"].long()
            self.outlier_weight = tensors["outlier_weight"].to(dtype)

    def matmul(self, x, bias=None):
        if self.columns is None:
            return self.product(x, bias)
        outliers = x[..., self.columns] @ self.outlier_weight.t()
        return self.product(x.index_fill(-1, self.columns, 0.0), bias).add_(outliers)

    def canonical(self):
        return self.canonical_tensors["qweight"]

    def dequantize(self):
        weight = w8a8_cpu.dequantize(self.codes, self.scale, self.canonical_tensors.get("zero_point"), self.dtype)
        return weight if self.columns is None else weight.index_copy_(1, self.columns, self.outlier_weight)


class Int8Layout(_QuantizedInputsLayout):
    """int8 codes, inputs in `format` "int8" or "int8_asymmetric". On a CPU with VNNI the codes are in oneDNN's
    order."""

    def __init__(self, tensors, dtype, format: str):
        super().__init__(tensors, dtype)
        self.format = format
        if format == "int8_asymmetric":
            self.tensors["code_sums"] = self.codes.sum(1, dtype=torch.int32)
        if self.codes.device.type == "cpu":
            packed = pack_int8(self.codes)
            self.replaces_qweight = packed is not self.codes
            self.codes = packed
        if self.replaces_qweight:
            self.tensors["packed"] = self.codes
            self.canonical_tensors = {name: tensor for name, tensor in tensors.items() if name != "qweight"}

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return quantized_linear(
            x,
            self.codes,
            self.scale,
            bias,
            format=self.format,
            scale=self.canonical_tensors.get("activation_scale"),
            zero_point=self.canonical_tensors.get("activation_zero_point"),
            w_zero_point=self.canonical_tensors.get("zero_point"),
            w_sums=self.tensors.get("code_sums"),
        )

    def canonical(self):
        return unpack_int8(self.codes).contiguous() if self.replaces_qweight else super().canonical()


class NativeInputsLayout(_QuantizedInputsLayout):
    """The layout `native` of the C++ kernels of a CPU. canonical: gives its qweight back."""

    replaces_qweight = True

    def __init__(self, native: Layout, canonical: Callable[[], torch.Tensor], tensors, dtype):
        super().__init__(tensors, dtype)
        self.native, self.tensors, self.product, self.canonical = native, native.tensors, native.matmul, canonical
        self.codes, self.canonical_tensors = None, {name: t for name, t in tensors.items() if name != "qweight"}

    @property
    def native_product(self):
        return self.native.native_product if self.columns is None else None

    def dequantize(self):
        weight = self.native.dequantize()
        return weight if self.columns is None else weight.index_copy_(1, self.columns, self.outlier_weight)


class LlmInt8Layout(_QuantizedInputsLayout):
    """int8 codes. Columns of the inputs that hold a magnitude of `threshold` or more are not rounded."""

    def __init__(self, tensors, dtype, threshold: float):
        super().__init__(tensors, dtype)
        self.threshold = threshold

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return llm_int8_linear(x, self.codes, self.scale, bias, threshold=self.threshold)


class Float8Layout(_QuantizedInputsLayout):
    """float8_e4m3fn or float8_e5m2 codes; inputs in `format` "fp8" or "fp8_block"."""

    def __init__(self, tensors, dtype, format: str):
        super().__init__(tensors, dtype)
        self.format = format

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = self.canonical_tensors.get("activation_scale")
        return quantized_linear(x, self.codes, self.scale, bias, format=self.format, scale=scale)
