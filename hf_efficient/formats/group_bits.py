"""Integer codes whose groups of columns have different numbers of bits: SliM-LLM (https://arxiv.org/abs/2405.14917)."""

from dataclasses import dataclass

import torch

from hf_efficient.formats.affine import AffineFormat
from hf_efficient.formats.base import Format
from hf_efficient.kernels.linear.codes import pack_codes, packed_width, unpack_codes
from hf_efficient.kernels.linear.layout import RestoredLayout


@dataclass(frozen=True)
class GroupBitsFormat(Format):
    """`w = (code - zero_point) * scale` with codes of `bits` - 1, `bits` or `bits` + 1 bits. As many whole groups of
    `group_size` columns have one bit less as have one more, so that every weight takes `bits` on average.

    Canonical tensors: "group_bits" uint8 [G], the bits of each group of columns; "qweight" uint8 [N, W], the codes of
    one group after the other, each from a byte of its own on; "scale" [N, G] and "zero_point" uint8 [N, G].

    The kernels of the next larger number of bits multiply it, and its codes have as many bits in memory.

    bits: 2 or 3. group_size: a positive multiple of 8."""

    bits: int
    group_size: int
    whole = "groups of columns have different numbers of bits"

    @property
    def widest(self) -> AffineFormat:
        """The format whose codes are large enough for every group."""
        return AffineFormat(self.bits + 1, self.group_size, False)

    def shapes(self, out_features, in_features):
        whole, rest = divmod(in_features, self.group_size)
        width = whole * (self.group_size * self.bits // 8) + packed_width(rest, self.bits)
        per_group = out_features, self.widest.groups(in_features)
        return {
            "qweight": (out_features, width),
            "scale": per_group,
            "zero_point": per_group,
            "group_bits": per_group[1:],
        }

    def dtypes(self, dtype):
        unsigned = dict.fromkeys(("qweight", "zero_point", "group_bits"), torch.uint8)
        return {**unsigned, "scale": dtype}

    def blank(self, out_features, in_features, dtype):
        tensors = super().blank(out_features, in_features, dtype)
        return {**tensors, "group_bits": torch.full_like(tensors["group_bits"], self.bits)}

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        bits, zero = tensors["group_bits"], tensors["zero_point"]
        change = bits.int() - self.bits
        short = in_features % self.group_size != 0
        if (change.abs() > 1).any() or change.sum() or (short and change[..., -1].any()):
            wanted = f"numbers around {self.bits}, on average {self.bits}, that of a short group {self.bits}"
            raise ValueError(f"group_bits holds {bits.tolist()}, expected {wanted}")
        if (zero >= 1 << bits.int()[..., None, :]).any():
            raise ValueError("zero_point holds numbers that are no codes of their group")

    def pack(self, codes: torch.Tensor, group_bits: torch.Tensor) -> torch.Tensor:
        """uint8 codes [N, K], those of each group below 2^bits -> qweight."""
        parts = zip(codes.split(self.group_size, 1), group_bits.tolist())
        return torch.cat([pack_codes(part, bits) for part, bits in parts], 1)

    def levels_of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The largest code of each group, float32 [G, 1]."""
        return (2.0 ** tensors["group_bits"].float() - 1)[:, None]

    def with_codes(self, codes: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` with other codes, uint8 [N, K]."""
        return {**tensors, "qweight": self.pack(codes, tensors["group_bits"])}

    def codes(self, tensors: dict[str, torch.Tensor], in_features: int) -> torch.Tensor:
        """Canonical tensors -> uint8 codes [..., N, in_features]."""
        qweight, bits = tensors["qweight"], tensors["group_bits"]
        if qweight.dim() == 3:
            each = range(len(qweight))
            return torch.stack([self.codes({n: t[i] for n, t in tensors.items()}, in_features) for i in each])
        codes, first = [], 0
        for start, own in zip(range(0, in_features, self.group_size), bits.tolist()):
            columns = min(self.group_size, in_features - start)
            width = packed_width(columns, own)
            codes.append(unpack_codes(qweight[:, first : first + width], own, columns))
            first += width
        return torch.cat(codes, 1)

    def dequantize(self, tensors, in_features, dtype):
        return self.widest.dequantize(self._unpacked(tensors, in_features), in_features, dtype)

    def layout(self, tensors, in_features, dtype):
        bits = tensors["group_bits"]
        layout = self.widest.layout(self._unpacked(tensors, in_features), in_features, dtype)
        if not layout.replaces_qweight:
            return self.dequantized_layout(tensors, in_features, dtype)

        def restore(layout):
            return self.pack(self.widest.unpack(layout.canonical(), in_features), bits)

        return RestoredLayout(layout, restore)

    def _unpacked(self, tensors, in_features) -> dict[str, torch.Tensor]:
        """The canonical tensors of `widest`."""
        qweight = self.widest.pack(self.codes(tensors, in_features))
        return {"qweight": qweight, "scale": tensors["scale"], "zero_point": tensors["zero_point"]}
