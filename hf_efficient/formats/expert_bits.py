"""Integer codes of a mixture whose experts have different numbers of bits."""

from dataclasses import dataclass, replace

import torch

from hf_efficient.formats.affine import AffineFormat
from hf_efficient.formats.base import Format
from hf_efficient.kernels.linear.codes import packed_width


@dataclass(frozen=True)
class ExpertBitsFormat(Format):
    """The weights of all experts of a mixture, those of expert e in `one` with `bits[e]` bits.

    Canonical tensors: "qweight" uint8 [bytes], the codes of one expert after the other; the others as `one` has them,
    [E, N, G].

    one: its own number of bits does not count.
    """

    bits: tuple[int, ...]
    one: AffineFormat

    @property
    def experts(self) -> int:
        return len(self.bits)

    def expert(self, index: int) -> AffineFormat:
        return replace(self.one, bits=self.bits[index])

    @property
    def _widest(self) -> AffineFormat:
        return replace(self.one, bits=max(self.bits))

    def shapes(self, out_features, in_features):
        return self._widest.shapes(out_features, in_features)

    def dtypes(self, dtype):
        return self.one.dtypes(dtype)

    def stacked_shapes(self, experts, out_features, in_features):
        shapes = super().stacked_shapes(experts, out_features, in_features)
        return {**shapes, "qweight": (out_features * sum(packed_width(in_features, bits) for bits in self.bits),)}

    def stack(self, each):
        flat = [{name: t.flatten() if name == "qweight" else t for name, t in own.items()} for own in each]
        whole = {name: torch.stack([own[name] for own in flat]) for name in flat[0] if name != "qweight"}
        return whole | ({"qweight": torch.cat([own["qweight"] for own in flat])} if "qweight" in flat[0] else {})

    def unstack(self, tensors, index, in_features):
        rows, widths = tensors["scale"].shape[1], [packed_width(in_features, bits) for bits in self.bits]
        first, last = rows * sum(widths[:index]), rows * sum(widths[: index + 1])
        own = {name: tensor[index] for name, tensor in tensors.items() if name != "qweight"}
        return own | {"qweight": tensors["qweight"][first:last].view(rows, -1)}

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        for index in range(self.experts):
            self.expert(index).check({name: tensor[index] for name, tensor in tensors.items()}, in_features)

    def dequantize(self, tensors, in_features, dtype):
        each = ((self.expert(e), self.unstack(tensors, e, in_features)) for e in range(self.experts))
        return torch.stack([format.dequantize(own, in_features, dtype) for format, own in each])

    def layout(self, tensors, in_features, dtype):
        """Of one expert with the most bits: what planning counts with."""
        return self._widest.layout(tensors, in_features, dtype)

    def bits_per_weight(self, out_features, in_features, dtype):
        each = (self.expert(e).bits_per_weight(out_features, in_features, dtype) for e in range(self.experts))
        return sum(each) / self.experts


def integer_codes(bits: int | list[int], *grid) -> AffineFormat | ExpertBitsFormat:
    """The format of codes of `bits` bits, or of experts with those of each. grid: the other fields of `AffineFormat`,
    in order."""
    if isinstance(bits, list):
        return ExpertBitsFormat(tuple(bits), AffineFormat(bits[0], *grid))
    return AffineFormat(bits, *grid)
