"""Weights of -1, 0 and 1 with inputs of 8 bits: BitNet b1.58 (https://arxiv.org/abs/2402.17764)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_efficient.formats.base import Format
from hf_efficient.kernels.linear.codes import pack_codes, packed_width, unpack_codes
from hf_efficient.kernels.linear.ternary import ternary_layout


_DIGITS = 5  # base-3 digits in a byte: 3^5 = 243


@dataclass(frozen=True)
class TernaryFormat(Format):
    """w = (code - 1) * scale with codes 0, 1, 2. Layouts round their inputs to int8, one scale a token.

    Canonical tensors: "qweight" uint8, 2 bits a weight, or 1.6 where `dense`: five codes are the base-3 digits of a
    byte, the lowest first. "scale" float32, which holds the scales of other checkpoints exactly: [1, 1], or [N, 1]
    where `per_channel`.
    """

    per_channel: bool = False
    dense: bool = False

    def shapes(self, out_features, in_features):
        width = -(-in_features // _DIGITS) if self.dense else packed_width(in_features, 2)
        return {"qweight": (out_features, width), "scale": (out_features if self.per_channel else 1, 1)}

    def dtypes(self, dtype):
        return {"qweight": torch.uint8, "scale": torch.float32}

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 codes [..., N, K] below 3 -> qweight."""
        if not self.dense:
            return pack_codes(codes, 2)
        digits = F.pad(codes, (0, -codes.shape[-1] % _DIGITS), value=1).unflatten(-1, (-1, _DIGITS))
        return sum(digits[..., place] * 3**place for place in range(_DIGITS))

    def unpack(self, qweight: torch.Tensor, in_features: int) -> torch.Tensor:
        """qweight -> uint8 codes [..., N, in_features]."""
        if not self.dense:
            return unpack_codes(qweight, 2, in_features)
        digits = torch.stack([qweight // 3**place % 3 for place in range(_DIGITS)], -1)
        return digits.flatten(-2)[..., :in_features]

    def round(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [N, K] -> canonical tensors by the paper's absmean: the scale is the mean magnitude (at least 1e-5),
        and each weight becomes the nearest of -scale, 0 and scale."""
        rows = weight.float()
        mean = rows.abs().mean(1, keepdim=True) if self.per_channel else rows.abs().mean().view(1, 1)
        inverse = 1.0 / mean.clamp_min(1e-5)  # rounded as in transformers' WeightQuant, to the bit
        codes = (rows * inverse).round_().clamp_(-1, 1).add_(1).to(torch.uint8)
        return {"qweight": self.pack(codes), "scale": 1.0 / inverse}

    def trits(self, qweight: torch.Tensor, in_features: int) -> torch.Tensor:
        """qweight -> int8 [..., N, in_features] of -1, 0 and 1."""
        return self.unpack(qweight, in_features).to(torch.int8) - 1

    rounds_inputs = True
    checks_codes = True

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        largest, codes = (
            (3**_DIGITS - 1, tensors["qweight"]) if self.dense else (2, self.unpack(tensors["qweight"], in_features))
        )
        if codes.max() > largest:
            raise ValueError(f"qweight holds {codes.max().item()}, expected 0 to {largest}")

    def dequantize(self, tensors, in_features, dtype):
        trits = self.trits(tensors["qweight"], in_features)
        return trits.to(tensors["scale"].dtype).mul_(tensors["scale"]).to(dtype)

    def layout(self, tensors, in_features, dtype):
        trits = self.trits(tensors["qweight"], in_features)
        layout = ternary_layout(trits, tensors["scale"], lambda trits: self.pack((trits + 1).to(torch.uint8)), dtype)
        return layout or self.dequantized_layout(tensors, in_features, dtype)


def canonical_of_bitnet(
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    *,
    out_features: int,
    linear_class: str,
    format: TernaryFormat,
) -> dict[str, torch.Tensor]:
    """The canonical tensors of a linear layer [out_features, K] of a checkpoint that transformers made with
    `BitNetQuantConfig`, with the same values bit for bit.

    Args:
        weight: uint8 [out_features / 4, K], bits 2 i and 2 i + 1 of row r being 1 + the weight of row r + i *
            out_features / 4. Or floats [out_features, K]: with a weight_scale only -c, 0 and c for some c; without one
            ("online") any, which are rounded here.
        weight_scale: one element; None for `quantization_mode="online"`.
        linear_class: "bitlinear", whose weight is divided by weight_scale, or "autobitlinear", where it is multiplied.
        format: one with a single scale for the tensor.

    Raises:
        ValueError: shapes that do not fit, another linear_class, or a weight that is not ternary.
    """
    if linear_class not in ("bitlinear", "autobitlinear") or format.per_channel:
        allowed = "it must be 'bitlinear' or 'autobitlinear', with one scale a tensor"
        raise ValueError(f"linear_class={linear_class!r}, {format}: {allowed}")
    rows = len(weight) * 4 if weight.dtype == torch.uint8 else len(weight)
    if rows != out_features:
        raise ValueError(f"a weight {weight.dtype} {tuple(weight.shape)} has {rows} rows, the layer {out_features}")
    if weight_scale is None:
        if weight.dtype == torch.uint8:
            raise ValueError("a packed weight comes with a weight_scale")
        return format.round(weight)
    scale = weight_scale.float().reshape(1, 1)
    if linear_class == "bitlinear":
        scale = 1.0 / scale
    if weight.dtype == torch.uint8:
        codes = torch.cat([weight >> shift & 3 for shift in (0, 2, 4, 6)])
        if codes.max() > 2:
            raise ValueError("the packed weight holds the code 3: ternary weights have 0, 1 and 2")
        return {"qweight": format.pack(codes), "scale": scale}
    magnitude = weight.abs().max()
    if not ((weight == 0) | (weight.abs() == magnitude)).all():
        raise ValueError("the weight comes with a weight_scale, but holds more values than -c, 0 and c")
    return {"qweight": format.pack((weight.sign() + 1).to(torch.uint8)), "scale": scale * magnitude.float()}
