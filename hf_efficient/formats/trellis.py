"""Weights coded along a trellis: `w = value * scale of its row`, values being read from a stream of bits."""

from dataclasses import dataclass

import torch

from hf_efficient.formats.base import Format
from hf_efficient.kernels.linear.native_trellis import NativeTrellisLayout
from hf_efficient.kernels.linear.trellis import TrellisTritonLayout
from hf_efficient.kernels.linear.trellis_codes import BAND, TRELLIS_BITS, bands, pack_trellis, sequences, unpack_trellis
from hf_efficient.kernels.linear.trellis_search import search


# How large the numbers to code are in units of the table: the root mean square with the least error, for normal numbers
_SPREAD = {1.5: 41.0, 2: 39.5, 2.5: 38.0, 3: 37.0, 3.5: 36.5, 4: 35.0, 4.5: 34.5, 5: 34.0}
# The squared error of normal numbers of variance 1, measured on 37,000 of them
_ERROR = {1.5: 0.140, 2: 0.0708, 2.5: 0.0362, 3: 0.0184, 3.5: 0.00942, 4: 0.00486, 4.5: 0.00250, 5: 0.00132}
_COLUMNS_AT_ONCE = 64


@dataclass(frozen=True)
class TrellisFormat(Format):
    """Canonical tensors: "qweight" uint8 [ceil(N / 32) * 4 * bits, K] (see `kernels.linear.trellis_codes`) and "scale"
    [N, 1].

    bits: of a weight, one of `WIDTHS`.
    """

    WIDTHS = TRELLIS_BITS
    bits: float
    whole = "the codes of a trellis run down many rows"

    def shapes(self, out_features, in_features):
        return {"qweight": (int(bands(out_features) * 4 * self.bits), in_features), "scale": (out_features, 1)}

    def dtypes(self, dtype):
        return {"qweight": torch.uint8, "scale": dtype}

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        """The scales of weight [N, K], of the weight's dtype, for which its numbers are as large as the values."""
        # a square of the weight itself may be too small for a float
        largest = weight.abs().amax(1, keepdim=True).float()
        mean_square = (weight.float() / torch.where(largest > 0, largest, 1)).square().mean(1, keepdim=True)
        return (largest * mean_square.sqrt() / _SPREAD[self.bits]).to(weight.dtype)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The paths nearest to columns of a weight [N, C] with `scale` [N, 1]: codes uint8 [rows, C], rows being N
        filled up to whole bands, for `pack`, and the dequantized columns, float32 [N, C]."""
        scale = scale.float()
        inverse = 1 / scale
        inverse = torch.where(inverse.isfinite(), inverse, 0)
        codes, values = search((weight.float() * inverse).t().contiguous(), self.bits)
        return codes.t(), values.t() * scale

    @property
    def expected_error(self) -> float:
        """The squared error of a row to be expected, relative to the row's mean square."""
        return _ERROR[self.bits]

    def sequences(self, out_features: int) -> list[int]:
        """The first row of each sequence of a column, and the number of rows."""
        return [BAND * band for band in sequences(out_features)[:-1]] + [out_features]

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 codes [rows, K] of whole bands -> qweight."""
        return pack_trellis(codes, self.bits)

    def round(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [N, K] -> canonical tensors with the nearest path of each sequence."""
        scale = self.scale(weight)
        codes = [self.nearest(columns, scale)[0] for columns in weight.split(_COLUMNS_AT_ONCE, 1)]
        return {"qweight": self.pack(torch.cat(codes, 1)), "scale": scale}

    def dequantize(self, tensors, in_features, dtype):
        scale = tensors["scale"]
        values = unpack_trellis(tensors["qweight"], self.bits, scale.shape[-2])
        work = torch.promote_types(dtype, torch.float32)
        return (values.to(work) * scale.to(work)).to(dtype)

    def layout(self, tensors, in_features, dtype):
        weight = tensors["qweight"], tensors["scale"], self.bits, in_features, dtype
        layout = NativeTrellisLayout.pack(*weight) or TrellisTritonLayout.pack(*weight)
        return layout or self.dequantized_layout(tensors, in_features, dtype)
