"""2:4 sparse weights: of every four neighbours along in_features exactly two are kept
(https://arxiv.org/abs/2104.08378)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear.layout import RestoredLayout
from hf_efficient.kernels.linear.sparse24 import Sparse24TritonLayout


_GROUPS = 3  # groups of four columns in a byte: 6^3 = 216 values
PLACES_COLUMNS = 4 * _GROUPS
_PAIRS = tuple((first, second) for first in range(4) for second in range(first + 1, 4))


@dataclass(frozen=True)
class Sparse24Format(MaskedFormat):
    """Canonical tensors: "qweight", the two kept weights of each group of four, [N, K / 2] values or [N, packed_width(K
    / 2)] codes, and "places" uint8 [N, ceil(K / 12)], which of the six pairs (0 1, 0 2, 0 3, 1 2, 1 3, 2 3) is kept:
    three groups a byte, as digits of base 6, the lowest first.

    This takes 0.542 of the memory of 16-bit weights, and 2.67 bits a weight instead of 4, without the scales.
    """

    mask_name = "places"

    def kept_shape(self, out_features, in_features):
        if in_features % 4:
            raise ValueError(f"pattern 2:4 does not divide in_features={in_features}: it must be a multiple of 4")
        return out_features, in_features // 2

    def mask_shape(self, out_features, in_features):
        return out_features, -(-in_features // PLACES_COLUMNS)

    def pack_mask(self, mask):
        groups = mask.unflatten(-1, (-1, 4))
        if (groups.sum(-1) != 2).any():
            place = (groups.sum(-1) != 2).nonzero()[0].tolist()
            kept = groups[tuple(place)].sum().item()
            raise ValueError(
                f"row {place[-2]} keeps {kept} of the columns from {4 * place[-1]} on: it must be 2 of every 4"
            )
        pairs = (groups * torch.tensor([1, 2, 4, 8], device=mask.device)).sum(-1)
        digit_of = torch.zeros(16, dtype=torch.uint8, device=mask.device)
        for digit, (first, second) in enumerate(_PAIRS):
            digit_of[1 << first | 1 << second] = digit
        digits = F.pad(digit_of[pairs], (0, -pairs.shape[-1] % _GROUPS)).unflatten(-1, (-1, _GROUPS))
        return sum(digits[..., place] * 6**place for place in range(_GROUPS))

    def mask(self, tensors, in_features):
        places = tensors["places"]
        if (places >= 6**_GROUPS).any():
            raise ValueError(f"places holds {places.max().item()}: three pairs of places are at most {6**_GROUPS - 1}")
        pairs = torch.tensor([[place in pair for place in range(4)] for pair in _PAIRS], device=places.device)
        digits = torch.stack([places // 6**place % 6 for place in range(_GROUPS)], -1)
        return pairs[digits.long()].flatten(-3)[..., :in_features]

    def device_layout(self, tensors, values, mask, dtype):
        """On a GPU the Triton kernels, for 16-bit weights and for 4-bit codes in groups that they serve."""
        if values.device.type == "cpu" or not triton_devices.serves(values.device):
            return super().device_layout(tensors, values, mask, dtype)
        return self.triton_layout(tensors, values, mask, dtype)

    def triton_layout(self, tensors, values, mask, dtype) -> RestoredLayout | None:
        """The layout of the Triton kernels; None where they do not serve this weight."""
        if self.weights is None:
            layout = Sparse24TritonLayout.pack(values, mask, dtype=dtype)
            return layout and RestoredLayout(layout, Sparse24TritonLayout.kept, places=self._places)
        scale, zero = tensors["scale"], tensors.get("zero_point")
        if self.weights.bits != 4 or (zero is not None and zero.is_floating_point()):
            return None
        layout = Sparse24TritonLayout.pack(values, mask, scale, zero, self.weights.group_size, dtype=dtype)
        return layout and RestoredLayout(layout, lambda own: self.weights.pack(own.kept()), places=self._places)

    def _places(self, layout: Sparse24TritonLayout) -> torch.Tensor:
        return self.pack_mask(layout.mask())
