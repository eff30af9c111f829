"""Unsigned integer codes on a regular grid: `w = (code - zero_point) * scale`, one scale and zero point a group."""

from dataclasses import dataclass

import torch

from hf_efficient.kernels.linear import dequantize_weight, pack_codes, unpack_codes


@dataclass(frozen=True)
class AffineFormat:
    """`bits` of a code (4 or 8), `group_size` weights along in_features that share a scale (-1: the whole row, None: the
    whole tensor), `symmetric`: the zero point is the middle of the grid and not stored."""

    bits: int
    group_size: int | None
    symmetric: bool

    @property
    def levels(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def groups(self, in_features: int) -> int:
        """Groups of a row; the last one is short when the group does not divide the row."""
        return 1 if self.group_size in (None, -1) else -(-in_features // self.group_size)

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each canonical tensor of a weight [out_features, in_features]."""
        per_group = (1 if self.group_size is None else out_features, self.groups(in_features))
        shapes = {
            "qweight": (out_features, in_features if self.bits == 8 else -(-in_features // 2)),
            "scale": per_group,
        }
        return shapes if self.symmetric else {**shapes, "zero_point": per_group}

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype of each canonical tensor of a weight of `dtype`."""
        dtypes = {"qweight": torch.uint8, "scale": dtype}
        return dtypes if self.symmetric else {**dtypes, "zero_point": torch.uint8}

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 codes [..., N, K] -> qweight."""
        return pack_codes(codes, self.bits)

    def unpack(self, qweight: torch.Tensor, in_features: int) -> torch.Tensor:
        """qweight -> uint8 codes [..., N, in_features]."""
        return unpack_codes(qweight, self.bits, in_features)

    def dequantize(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """Canonical tensors -> the weight [..., N, in_features] in `dtype`."""
        return dequantize_weight(
            tensors["qweight"],
            tensors["scale"],
            tensors.get("zero_point"),
            bits=self.bits,
            group_size=self.group_size,
            in_features=in_features,
            dtype=dtype,
        )

    def bits_per_weight(self, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        """Bits a weight takes on disk, scales and zero points included."""
        dtypes, total = self.dtypes(dtype), 0
        for name, (rows, columns) in self.shapes(out_features, in_features).items():
            total += rows * columns * dtypes[name].itemsize * 8
        return total / (out_features * in_features)
