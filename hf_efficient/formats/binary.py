"""Weights of one or two bits whose magnitudes are few: BiLLM, DB-LLM and PB-LLM. `w = integer * scale of its row`.

Every magnitude is stored as a whole number of steps of its row, in 8 bits. On CPUs kernels read the codes of 2 bits of
BiLLM and DB-LLM. Else a weight is an int8 weight with a scale a row, and the kernels of 8 bits multiply it as it is: in
memory it takes their 8 bits, and those of what the codes are made of again when it is saved: for PB-LLM the bitmap."""

from dataclasses import dataclass

import torch

from hf_efficient.formats.affine import AffineFormat
from hf_efficient.formats.base import Format, even_mask
from hf_efficient.formats.grouped_codes import GroupedCodes
from hf_efficient.kernels.linear.codes import expand_groups, pack_codes, packed_width, unpack_codes
from hf_efficient.kernels.linear.layout import Layout, RestoredLayout
from hf_efficient.kernels.linear.native_binary import NativeBinaryLayout


LARGEST = 127  # of the integers' magnitudes
SALIENT = 0.1  # of the weights keep 8 bits in PB-LLM
_INT8 = AffineFormat(8, -1, True)


class BinaryFormat(Format):
    """What the formats share: "scale" [N, 1], and `integers`."""

    whole = "its magnitudes are steps of whole rows"

    def integers(self, tensors: dict[str, torch.Tensor], in_features: int) -> torch.Tensor:
        """The weight in steps of its rows: int8 [..., N, in_features]."""
        raise NotImplementedError

    def dequantize(self, tensors, in_features, dtype):
        return self.integers(tensors, in_features).to(dtype).mul_(tensors["scale"].to(dtype))

    def codes_of(self, integers: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The "qweight" of a weight [N, K] in steps, int8: of codes with one meaning the first. tensors: those that do
        not follow from it."""
        raise NotImplementedError

    def layout(self, tensors, in_features, dtype):
        codes = (self.integers(tensors, in_features) ^ -128).view(torch.uint8)  # + 128
        layout = _INT8.layout({"qweight": codes, "scale": tensors["scale"]}, in_features, dtype)
        if layout.replaces_qweight:
            layout = self._restored(layout, {n: t for n, t in tensors.items() if n not in ("qweight", "scale")})
            if torch.equal(layout.canonical(), tensors["qweight"]):
                return layout
        return self.dequantized_layout(tensors, in_features, dtype)

    def _restored(self, layout: Layout, own: dict[str, torch.Tensor]) -> RestoredLayout:
        """The layout of `_INT8` for a weight whose canonical tensors besides codes and scales are `own`."""
        return RestoredLayout(layout, lambda each: self.codes_of(_in_steps(each), own))


class TwoBitFormat(GroupedCodes, BinaryFormat):
    """Codes of 2 bits. Bits of a code choose which factors of its group add up to the integer.

    Canonical tensors: "qweight", 2 bits a weight, "factors" int8 [N, `KINDS` * G], those of a kind for all groups, then
    of the next one, and "scale" [N, 1]."""

    bits = 2
    KINDS: int

    def shapes(self, out_features, in_features):
        return {
            "qweight": (out_features, packed_width(in_features, 2)),
            "factors": (out_features, self.KINDS * self.groups(in_features)),
            "scale": (out_features, 1),
        }

    def dtypes(self, dtype):
        return {"qweight": torch.uint8, "factors": torch.int8, "scale": dtype}

    def signs(self, codes: torch.Tensor, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """How often each kind of factor counts in each weight: for every kind int8 [..., N, K] of -1, 0 and 1.

        codes: uint8 [..., N, K] or what broadcasts to it. tensors: what the format has besides codes and factors."""
        raise NotImplementedError

    def expanded(self, factors: torch.Tensor, in_features: int) -> list[torch.Tensor]:
        """Factors [..., N, KINDS * G] -> for every kind what broadcasts to [..., N, in_features]."""
        return [expand_groups(kind, self.group_size, in_features) for kind in factors.chunk(self.KINDS, -1)]

    def marked(self, tensors: dict[str, torch.Tensor], in_features: int) -> torch.Tensor | None:
        """The columns that have factors of their own, bool [K]; None where all have the same."""
        return None

    def layout(self, tensors, in_features, dtype):
        stored = (tensors[name] for name in ("qweight", "factors", "scale"))
        scheme = self.marked(tensors, in_features), self.group_size, in_features, dtype
        return NativeBinaryLayout.pack(*stored, *scheme) or super().layout(tensors, in_features, dtype)

    def integers(self, tensors, in_features):
        signs = self.signs(self.unpack(tensors["qweight"], in_features), tensors)
        factors = self.expanded(tensors["factors"], in_features)
        return sum(sign * factor for sign, factor in zip(signs, factors))


@dataclass(frozen=True)
class SplitBinaryFormat(TwoBitFormat):
    """BiLLM (https://arxiv.org/abs/2402.04291): signs, and for each weight which of two magnitudes it has. A group has
    two magnitudes for its salient columns and two for the others.

    Codes: 1, negative; 2, the larger magnitude. Factors, 0 to 127: of salient columns the smaller and the larger one,
    then of the others. Besides: "salient" uint8 [1, ceil(K / 8)], a bit a column."""

    group_size: int
    KINDS = 4

    def shapes(self, out_features, in_features):
        return {**super().shapes(out_features, in_features), "salient": (1, packed_width(in_features, 1))}

    def dtypes(self, dtype):
        return {**super().dtypes(dtype), "salient": torch.uint8}

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        _check(tensors["factors"], "factors", 0)

    def pack_salient(self, marks: torch.Tensor) -> torch.Tensor:
        """Which columns are salient, bool [K] -> "salient"."""
        return pack_codes(marks.to(torch.uint8)[None], 1)

    def marked(self, tensors, in_features):
        return unpack_codes(tensors["salient"], 1, in_features)[0].bool()

    def signs(self, codes, tensors):
        salient = unpack_codes(tensors["salient"], 1, codes.shape[-1]).view(torch.int8)
        sign, large = 1 - 2 * (codes & 1).view(torch.int8), (codes >> 1).view(torch.int8)
        small, large = sign * (1 - large), sign * large
        return [small * salient, large * salient, small * (1 - salient), large * (1 - salient)]

    def codes_of(self, integers, tensors):
        columns = integers.shape[1]
        salient = unpack_codes(tensors["salient"], 1, columns).bool()
        parts = self.expanded(tensors["factors"], columns)
        small, large = (torch.where(salient, parts[kind], parts[kind + 2]) for kind in (0, 1))
        is_large = (integers.abs() == large) & (large != small)
        return self.pack((integers < 0).to(torch.uint8) | is_large.to(torch.uint8) << 1)


@dataclass(frozen=True)
class DualBinaryFormat(TwoBitFormat):
    """DB-LLM (https://arxiv.org/abs/2402.11960): `w = first * b + second * c` with bits b and c, that is 0, two numbers
    of opposite signs and their sum.

    Codes: 1, the first factor; 2, the second."""

    group_size: int
    KINDS = 2

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        first, second = tensors["factors"].chunk(2, -1)
        _check(tensors["factors"], "factors", -LARGEST)
        if (first.sign() * second.sign() > 0).any():
            raise ValueError("factors holds two of one sign in a group: expected opposite signs")

    def signs(self, codes, tensors):
        return [(codes & 1).view(torch.int8), (codes >> 1).view(torch.int8)]

    def codes_of(self, integers, tensors):
        first, second = self.expanded(tensors["factors"], integers.shape[1])
        codes = torch.full_like(integers, 3, dtype=torch.uint8)
        for code, number in ((2, second), (1, first), (0, torch.zeros_like(first))):
            codes.masked_fill_(integers == number, code)
        return self.pack(codes)


@dataclass(frozen=True)
class PartlyBinaryFormat(BinaryFormat):
    """PB-LLM (https://arxiv.org/abs/2310.00034): a tenth of the weights, the salient ones, keep 8 bits; the others are
    signs with a magnitude a row.

    Canonical tensors: "bitmap" uint8 [N, ceil(K / 8)], a bit for each weight, set where it is salient; "qweight" uint8,
    a bit (1: negative) for each of the other weights, row after row; "values" int8, the salient ones; "magnitude" int8
    [N, 1], that of the others, and "scale" [N, 1]."""

    def salient(self, out_features: int, in_features: int) -> int:
        """How many weights are salient."""
        return max(1, round(SALIENT * out_features * in_features))

    def shapes(self, out_features, in_features):
        count = self.salient(out_features, in_features)
        return {
            "qweight": (packed_width(out_features * in_features - count, 1),),
            "values": (count,),
            "bitmap": (out_features, packed_width(in_features, 1)),
            "magnitude": (out_features, 1),
            "scale": (out_features, 1),
        }

    def dtypes(self, dtype):
        codes = {"qweight": torch.uint8, "bitmap": torch.uint8}
        return {**codes, "values": torch.int8, "magnitude": torch.int8, "scale": dtype}

    checks_codes = True

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        _check(tensors["magnitude"], "magnitude", 0)
        _check(tensors["values"], "values", -LARGEST)
        marks = unpack_codes(tensors["bitmap"], 1, in_features).flatten(-2).sum(-1)
        if (marks != tensors["values"].shape[-1]).any():
            raise ValueError(f"bitmap marks {marks.tolist()} weights, values holds {tensors['values'].shape[-1]}")

    def blank(self, out_features, in_features, dtype):
        mask = even_mask(out_features, in_features, self.salient(out_features, in_features))
        return {**super().blank(out_features, in_features, dtype), "bitmap": pack_codes(mask.to(torch.uint8), 1)}

    def _restored(self, layout, own):
        bitmap = own["bitmap"]

        def values(layout):
            integers = _in_steps(layout)
            return integers[unpack_codes(bitmap, 1, integers.shape[1]).bool()]

        return RestoredLayout(layout, lambda each: self.codes_of(_in_steps(each), {"bitmap": bitmap}), values=values)

    def pack(self, integers: torch.Tensor, salient: torch.Tensor) -> dict[str, torch.Tensor]:
        """int8 [N, K] and which are salient, bool [N, K] -> "qweight", "values" and "bitmap"."""
        own = {"values": integers[salient], "bitmap": pack_codes(salient.to(torch.uint8), 1)}
        return {"qweight": self.codes_of(integers, own), **own}

    def codes_of(self, integers, tensors):
        salient = unpack_codes(tensors["bitmap"], 1, integers.shape[1]).bool()
        return pack_codes((integers[~salient] < 0).to(torch.uint8), 1)

    def integers(self, tensors, in_features):
        salient = unpack_codes(tensors["bitmap"], 1, in_features).bool()
        others = salient.shape[-2] * in_features - tensors["values"].shape[-1]
        signs = unpack_codes(tensors["qweight"], 1, others).bool()
        negative = torch.zeros_like(salient).masked_scatter_(~salient, signs)
        magnitude = tensors["magnitude"].expand(salient.shape)
        signed = torch.where(negative, -magnitude, magnitude)
        return signed.masked_scatter_(salient, tensors["values"])


def _in_steps(layout: Layout) -> torch.Tensor:
    """The weight in a layout of `_INT8` in steps of its rows: int8 [N, K]."""
    return layout.canonical().view(torch.int8) ^ -128


def _check(values: torch.Tensor, name: str, smallest: int) -> None:
    if values.min() < smallest:
        raise ValueError(f"{name} holds {values.min().item()}, expected {smallest} to {LARGEST}")


def of_method(method: str, group_size: int) -> BinaryFormat:
    """The format of "billm", "db_llm" or "pb_llm"."""
    if method == "pb_llm":
        return PartlyBinaryFormat()
    return {"billm": SplitBinaryFormat, "db_llm": DualBinaryFormat}[method](group_size)
