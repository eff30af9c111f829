"""Unsigned integer codes on a regular grid, one scale and zero point a group: `w = (code - zero_point) * scale`."""

from dataclasses import dataclass, replace

import torch

from hf_efficient.formats.grouped_codes import GroupedCodes
from hf_efficient.kernels.linear.codes import packed_width
from hf_efficient.kernels.linear.grouped import GroupedTritonLayout
from hf_efficient.kernels.linear.layout import RestoredLayout
from hf_efficient.kernels.linear.weight_only import dequantize_weight, device_layout


@dataclass(frozen=True)
class AffineFormat(GroupedCodes):
    """Canonical tensors: "qweight" uint8 (see `kernels.linear.codes`), "scale" and "zero_point" or "minimum", one a
    group. The kernels of 8 bits multiply codes of 6 bits, which have 8 in memory.

    Args:
        bits, group_size: see `GroupedCodes`; 2, 3, 4, 6 or 8 bits.
        symmetric: the zero point is the middle of the grid and not stored.
        int8_on_cpu: whether inputs are rounded to int8 on a CPU: True, False or "auto", as in `WeightOnlyConfig`.
        zero_point: "integer", "float" (of the scale's dtype), or "minimum" (of the scale's dtype): w = code * scale +
            minimum.
        scale_dtype: a name like "float32" where it is not the weight's dtype; `dequantize` then computes in it and
            rounds.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    int8_on_cpu: bool | str = False
    zero_point: str = "integer"
    scale_dtype: str | None = None

    @property
    def levels(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    @property
    def adopted(self) -> bool:
        return self.zero_point == "minimum" or self.scale_dtype is not None

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        per_group = self.per_group(out_features, in_features)
        shapes = {"qweight": (out_features, packed_width(in_features, self.bits)), "scale": per_group}
        return shapes if self.symmetric else {**shapes, self._offset: per_group}

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        scale = getattr(torch, self.scale_dtype) if self.scale_dtype else dtype
        dtypes = {"qweight": torch.uint8, "scale": scale}
        if not self.symmetric:
            dtypes[self._offset] = torch.uint8 if self.zero_point == "integer" else scale
        return dtypes

    @property
    def _offset(self) -> str:
        return "minimum" if self.zero_point == "minimum" else "zero_point"

    def levels_of(self, tensors: dict[str, torch.Tensor]) -> int:
        """`levels`; a format with bits a group has those of each, float32 [G, 1]."""
        return self.levels

    def codes(self, tensors: dict[str, torch.Tensor], in_features: int) -> torch.Tensor:
        """Canonical tensors -> uint8 codes [..., N, in_features]."""
        return self.unpack(tensors["qweight"], in_features)

    def with_codes(self, codes: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` with other codes, uint8 [N, K]."""
        return {**tensors, "qweight": self.pack(codes)}

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        zero = tensors.get("zero_point")
        if zero is not None and self.zero_point == "integer" and zero.max() > self.levels:
            raise ValueError(f"zero_point holds {zero.max().item()}, expected codes from 0 to {self.levels}")

    def dequantize(self, tensors, in_features, dtype):
        work = tensors["scale"].dtype if self.scale_dtype else dtype
        parts = tensors["qweight"], tensors["scale"], tensors.get("zero_point"), tensors.get("minimum")
        return dequantize_weight(*parts, **self._arguments(in_features, work)).to(dtype)

    def layout(self, tensors, in_features, dtype):
        if self.bits == 6:
            return self._layout_of_bytes(tensors, in_features, dtype)
        arguments = self._arguments(in_features, dtype)
        layout = device_layout(*_ordered(tensors), **arguments, int8_on_cpu=self.int8_on_cpu)
        return layout or self.dequantized_layout(tensors, in_features, dtype)

    def _layout_of_bytes(self, tensors, in_features, dtype):
        """The layout of the same weight in codes of 8 bits, with the same middle where no zero point is stored."""
        added = 2**7 - 2 ** (self.bits - 1) if self.symmetric else 0
        bytes_ = {**tensors, "qweight": self.codes(tensors, in_features) + added}
        layout = replace(self, bits=8).layout(bytes_, in_features, dtype)
        if not layout.replaces_qweight:
            return self.dequantized_layout(tensors, in_features, dtype)
        return RestoredLayout(layout, lambda each: self.pack(each.canonical() - added))

    def grouped_layout(self, tensors, in_features, dtype):
        device = tensors["qweight"].device
        if (
            self.bits != 6
            and self.zero_point == "integer"
            and GroupedTritonLayout.supports(device, self.group_size, dtype)
        ):
            return GroupedTritonLayout(*_ordered(tensors), **self._arguments(in_features, dtype))
        return None

    def _arguments(self, in_features: int, dtype: torch.dtype) -> dict:
        return dict(bits=self.bits, group_size=self.group_size, in_features=in_features, dtype=dtype)


def _ordered(tensors: dict[str, torch.Tensor]) -> tuple:
    """(qweight, scale, the zero point that the kernels read: uint8, or float32 where it is no integer)."""
    scale, zero = tensors["scale"], tensors.get("zero_point")
    if "minimum" in tensors:
        zero = torch.where(scale == 0, 0, -tensors["minimum"].float() / scale.float())
    elif zero is not None and zero.is_floating_point():
        zero = zero.float()
    return tensors["qweight"], scale, zero
