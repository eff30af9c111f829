"""Sparse weights of any pattern: a bit for each weight, and the kept weights."""

from dataclasses import dataclass

import torch

from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.kernels.linear.codes import pack_codes, packed_width, unpack_codes


@dataclass(frozen=True)
class BitmapFormat(MaskedFormat):
    """Canonical tensors: "bitmap" uint8 [N, ceil(K / 8)], in which bit k % 8 of byte k / 8 is set where column k is
    kept, and "qweight", the kept weights row after row: [kept] values or [packed_width(kept)] codes.

    `sparsity`, `pattern` and `group`, which decide how many weights are kept, are those of
    `hf_efficient.pruning.mask.Sparsity`.
    """

    sparsity: float = 0.5
    pattern: tuple[int, int] | None = None
    group: str = "row"

    mask_name = "bitmap"

    def kept(self, out_features: int, in_features: int) -> int:
        """The exact number of weights kept of [out_features, in_features]."""
        if self.pattern:
            n, m = self.pattern
            if in_features % m:
                raise ValueError(
                    f"pattern {n}:{m} does not divide in_features={in_features}: it must be a multiple of {m}"
                )
            return out_features * in_features // m * n
        competitors = in_features if self.group == "row" else out_features * in_features
        return out_features * in_features // competitors * max(1, round((1 - self.sparsity) * competitors))

    def kept_shape(self, out_features, in_features):
        return (self.kept(out_features, in_features),)

    def mask_shape(self, out_features, in_features):
        return out_features, packed_width(in_features, 1)

    def pack_mask(self, mask):
        self._check(mask)
        return pack_codes(mask.to(torch.uint8), 1)

    def mask(self, tensors, in_features):
        mask = unpack_codes(tensors["bitmap"], 1, in_features).bool()
        self._check(mask)
        return mask

    def _check(self, mask: torch.Tensor) -> None:
        expected, counts = self.kept(*mask.shape[-2:]), mask.flatten(-2).sum(-1)
        if (counts != expected).any():
            given = f"{counts.flatten().tolist()} of {tuple(mask.shape)}"
            raise ValueError(f"the mask keeps {given} weights: {self} keeps {expected}")
