"""Weights on a regular grid, which every target holds, and why it does not hold others."""

import math
from collections.abc import Callable

import torch

from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.binary import BinaryFormat
from hf_efficient.formats.codebook import FP4_BLOCKS, CodebookFormat
from hf_efficient.formats.group_bits import GroupBitsFormat
from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.formats.trellis import TrellisFormat


def check_layers(source: Source, target: str, why_not: Callable[[Layer], str | None]) -> None:
    """Raises for the layers that `target` cannot hold: those for which `why_not` gives a reason, or which no target
    holds."""
    if not source.layers:
        raise ValueError(
            f"the model has no compressed layer, so there is nothing to write as {target}: save_pretrained writes "
            "what every engine reads"
        )
    refused = {layer.name: reason for layer in source.layers if (reason := _no_target(layer) or why_not(layer))}
    if refused:
        name, reason = next(iter(refused.items()))
        raise ValueError(
            f"{len(refused)} of {len(source.layers)} compressed layers cannot be written as {target}, for example "
            f"{name}: {reason}. dequantize() the model first and export or save that, or quantize it with another "
            "config (overrides= and modules_to_not_convert= settle single layers)"
        )


def _no_target(layer: Layer) -> str | None:
    """Why no format of codes on a grid can hold the layer; None where one may."""
    format = layer.weight.format
    if layer.weight.experts is not None:
        return "the fused weights of experts"
    if layer.transposed:
        return "a Conv1D, where other engines quantize nn.Linear only"
    if isinstance(format, TransformedFormat):
        if format.input_bits:
            return f"its input is rounded to {format.input_bits} bits (activation_bits), which their layouts do not say"
        if format.rotation:
            return "its input is rotated while the model runs (rotate=True), which other engines do not do"
        if format.input_scale:
            return (
                "its input is multiplied by factors that could not be folded into the layer before (AWQ, SmoothQuant)"
            )
        return "its columns are in another order than its input (GPTQ's activation order)"
    if isinstance(format, CodebookFormat) and format.codebook not in FP4_BLOCKS:
        return f"its codes are entries of a table (codebook={format.codebook!r}), not points of a grid"
    if isinstance(format, TrellisFormat):
        return "its values are states of a trellis (codebook='trellis'), which other engines do not read"
    if isinstance(format, (BinaryFormat, GroupBitsFormat)):
        return "its codes are those of BiLLM, DB-LLM, PB-LLM or SliM-LLM, which other engines do not read"
    if isinstance(format, MaskedFormat):
        return "kept values without codes (SparseConfig), for which compressed-tensors 0.15 and later have no layout"
    if isinstance(format, TernaryFormat):
        return "ternary weights (BitNetConfig)"
    return None


def stored_zero(format: AffineFormat) -> str:
    """What stands where the grid is not symmetric: "integer" zero points, or as other libraries have it "float" or
    "minimum"."""
    return getattr(format, "zero_point", "integer")


def affine_only(layer: Layer, bits: tuple[int, ...]) -> str | None:
    """Why the layer is not a grid of one of these widths."""
    format = layer.weight.format
    if isinstance(format, CodebookFormat):
        return f"FP4 weights (codebook={format.codebook!r}); compressed-tensors has them"
    if not isinstance(format, AffineFormat):
        return f"weights and activations in 8 bits ({type(format).__name__}); this target has weights only"
    if stored_zero(format) != "integer":
        return f"{stored_zero(format)} zero points; this target has integers"
    if format.bits not in bits:
        return f"weights of {format.bits} bits; this target has {' or '.join(map(str, bits))}"
    return None


def group_of(layer: Layer) -> int:
    """The largest group that divides the row and all of the layer's groups: its scales are repeated for them."""
    own, width = layer.weight.format.group_size, layer.weight.in_features
    return width if own in (None, -1) or own >= width else math.gcd(own, width)


def common_group(layers: list[Layer]) -> int:
    """One group size for all layers, -1 where each has a scale a row."""
    if all(group_of(layer) == layer.weight.in_features for layer in layers):
        return -1
    return math.gcd(*(group_of(layer) for layer in layers))


def per_group(layer: Layer, part: str, group: int) -> torch.Tensor:
    """The scales or zero points of an affine layer for groups of `group` (-1: a row), which divides its own: [N, K /
    group]. The zero points of a symmetric layer are the middle of the grid."""
    weight, format = layer.weight, layer.weight.format
    group = weight.in_features if group == -1 else group
    columns = weight.in_features // group
    if part == "zero_point" and format.symmetric:
        return torch.full((weight.out_features, columns), 2 ** (format.bits - 1), dtype=torch.uint8)
    values = layer.read(part)
    if part == "zero_point" and values.max() > format.levels:
        raise ValueError(
            f"{layer.name}: its zero point {values.max().item()} lies outside of the grid 0 ... {format.levels}"
        )
    if values.shape[1] > 1:
        values = values.repeat_interleave(format.group_size // group, 1)[:, :columns]
    return values.expand(weight.out_features, columns).contiguous()


def words(packed: torch.Tensor, count: int) -> torch.Tensor:
    """A stream of bytes [R, B] -> its first `count` little-endian words, int32 [R, count], filled with zeros."""
    width = 4 * count
    padded = torch.nn.functional.pad(packed[:, :width], (0, max(0, width - packed.shape[1])))
    return padded.flatten().view(torch.int32).view(-1, count)


def as_float16(layer: Layer, values: torch.Tensor) -> torch.Tensor:
    """`values` in float16; the rounding shows in `rounding_of`.

    Raises:
        ValueError: one is too large for float16.
    """
    rounded = values.to(torch.float16)
    if not rounded.isfinite().all():
        raise ValueError(
            f"{layer.name}: a scale of {values.abs().max().item():.3g} does not fit the float16 of this target, whose "
            "largest number is 65504: dequantize() the model first"
        )
    return rounded


def rounding_of(scale: torch.Tensor, levels: int, zero=0, offset: torch.Tensor | None = None) -> float:
    """The largest change of a weight `(code - zero) * scale + offset` with codes 0 ... levels by rounding scale and
    offset to float16, as a part of the largest weight that the layer can hold."""
    zero = zero.double() if isinstance(zero, torch.Tensor) else zero
    moved = 0 if offset is None else _float16_error(offset)
    change = [(_float16_error(scale) * (code - zero) + moved).abs().max() for code in (0, levels)]
    span = (scale.double().abs().max() * levels).clamp_min(torch.finfo(torch.float64).tiny)
    return (torch.stack(change).max() / span).item()


def _float16_error(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).double() - values.double()
