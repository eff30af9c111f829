"""A weight whose input is transformed first: reordered (GPTQ's activation order), scaled per channel (AWQ,
SmoothQuant), rotated (QuIP, QuaRot), rounded to few bits."""

from dataclasses import dataclass

import torch

from hf_efficient.formats.base import Format
from hf_efficient.kernels.hadamard import unrotate_weight
from hf_efficient.kernels.linear.layout import Layout
from hf_efficient.kernels.linear.native_hadamard import rotate
from hf_efficient.kernels.linear.reordered import reorder
from hf_efficient.kernels.linear.rounded_inputs import COLUMNS as ROUNDED_COLUMNS
from hf_efficient.kernels.linear.rounded_inputs import round_inputs


__all__ = ["ROUNDED_COLUMNS", "TransformedFormat"]


@dataclass(frozen=True)
class TransformedFormat(Format):
    """y = round(rotate(x[input_order] * input_scale)) @ Wq^T, with Wq in the format `inner`.

    Each flag adds a canonical tensor: "input_order" int32 [K], "input_scale" [K] in the weight's dtype, and for
    `rotation` "rotation_signs" int8 [K], the random signs before the Hadamard transform. `input_bits`, where it is not
    None, is what the input is rounded to (`kernels.linear.rounded_inputs`), which keeps no tensor.
    """

    inner: Format
    input_scale: bool = False
    rotation: bool = False
    input_order: bool = False
    input_bits: int | None = None

    @property
    def rounds_inputs(self) -> bool:
        return self.input_bits is not None or self.inner.rounds_inputs

    @property
    def adopted(self) -> bool:
        return self.input_order or self.inner.adopted

    def shapes(self, out_features, in_features):
        own = {name: (in_features,) for name in self._own()}
        return {**self.inner.shapes(out_features, in_features), **own}

    def dtypes(self, dtype):
        own = {"input_order": torch.int32, "input_scale": dtype, "rotation_signs": torch.int8}
        return {**self.inner.dtypes(dtype), **{name: own[name] for name in self._own()}}

    @property
    def checks_codes(self) -> bool:
        return self.inner.checks_codes

    def check(self, tensors, in_features):
        own = self._own()
        self.inner.check({name: tensor for name, tensor in tensors.items() if name not in own}, in_features)
        super().check({name: tensors[name] for name in own}, in_features)
        if self.input_order:
            order = tensors["input_order"].sort(-1).values
            if not (order == torch.arange(in_features, device=order.device)).all():
                raise ValueError(f"input_order is no order of the {in_features} columns")
        if self.rotation and not (tensors["rotation_signs"].abs() == 1).all():
            raise ValueError("rotation_signs holds other numbers than -1 and 1")

    def dequantize(self, tensors, in_features, dtype):
        """The weight for an input that is not transformed. The transforms are multiplied into it in float32."""
        computes = self.rotation or self.input_scale
        weight = self.inner.dequantize(tensors, in_features, torch.float32 if computes else dtype)
        if self.rotation:
            weight = unrotate_weight(weight, tensors["rotation_signs"][..., None, :])
        if self.input_scale:
            weight = weight * tensors["input_scale"][..., None, :].float()
        if self.input_order:
            places = tensors["input_order"].long().argsort(-1)[..., None, :]
            weight = weight.gather(-1, places.expand(weight.shape))
        return weight.to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The transformed input x [..., K] as the weight multiplies it. Gradients pass the rounding."""
        if self.input_bits is None:
            return x
        rounded = round_inputs(x.detach(), self.input_bits)
        return x + (rounded - x.detach()) if x.requires_grad else rounded

    def layout(self, tensors, in_features, dtype):
        return _TransformedLayout(self, tensors, self.inner.layout(tensors, in_features, dtype), in_features)

    def dequantized_layout(self, tensors, in_features, dtype):
        if self.input_bits is None:
            return super().dequantized_layout(tensors, in_features, dtype)
        inner = self.inner.dequantized_layout(tensors, in_features, dtype)
        return _TransformedLayout(self, tensors, inner, in_features)

    def _own(self) -> list[str]:
        used = {"input_order": self.input_order, "input_scale": self.input_scale, "rotation_signs": self.rotation}
        return [name for name in used if used[name]]


class _TransformedLayout(Layout):
    """Transforms the input, then multiplies by the layout of the inner format."""

    def __init__(self, format: TransformedFormat, stored: dict[str, torch.Tensor], inner: Layout, in_features: int):
        self.format, self.stored, self.inner, self.in_features = format, dict(stored), inner, in_features
        self.replaces_qweight, self.tensors, self.dtype = inner.replaces_qweight, inner.tensors, inner.dtype
        self.canonical = inner.canonical
        if inner.replaces_qweight:
            del self.stored["qweight"]
        else:
            self.canonical = lambda: stored["qweight"]
        self.input_order = stored["input_order"].long() if format.input_order else None
        self.input_scale = stored["input_scale"].to(inner.dtype) if format.input_scale else None
        self.signs = stored["rotation_signs"].to(inner.dtype) if format.rotation else None
        if format.rotation and format.input_scale:  # one product of the input less
            self.signs, self.input_scale = self.signs * self.input_scale, None

    def matmul(self, x, bias=None):
        if self.input_order is not None:
            x = reorder(x, self.input_order)
        if self.input_scale is not None:
            x = x * self.input_scale
        if self.signs is not None:
            x = rotate(x, self.signs)
        return self.inner.matmul(self.format.rounded(x), bias)

    def dequantize(self):
        return self.format.dequantize({**self.stored, "qweight": self.canonical()}, self.in_features, self.dtype)
