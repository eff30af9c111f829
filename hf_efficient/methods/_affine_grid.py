"""Affine grids: the grid that covers a range, and the codes of weights on a grid.

A grid is (scale, zero point), each [N, G], or [1, 1] for a format with one scale per tensor. The scale is in the
weight's dtype, as it is stored, because codes are chosen for the stored scale. The zero point is float32 and holds
integers, or, for formats with zero_point="float", values of the weight's dtype."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_efficient.formats import AffineFormat
from hf_efficient.formats.base import divide


Grid = tuple[torch.Tensor, torch.Tensor]
_SCALE_OF_ZEROS = 2.0**-14  # float16's smallest normal, in which other libraries store scales


def group_width(format: AffineFormat, in_features: int) -> int:
    """Number of neighbours in a row that share a scale."""
    return in_features if format.group_size in (None, -1) else min(format.group_size, in_features)


def grouped(weight: torch.Tensor, width: int) -> torch.Tensor:
    """[N, K] -> float32 [N, G, width]. A short last group repeats its last column, which changes no range."""
    weight = weight.float()
    if weight.shape[1] % width:
        weight = F.pad(weight[None], (0, -weight.shape[1] % width), mode="replicate")[0]
    return weight.unflatten(1, (-1, width))


def group_importance(importance: torch.Tensor | None, format: AffineFormat, in_features: int) -> torch.Tensor | None:
    """Weights of the squared errors of the columns, float [K] or None (all equal) -> float32 [G, width], 0 where a
    short last group is padded; None where all are equal."""
    width = group_width(format, in_features)
    if importance is None:
        if in_features % width == 0:
            return None
        importance = torch.ones(in_features, dtype=torch.float32)
    return F.pad(importance.float(), (0, -in_features % width)).view(-1, width)


def covering_grid(weight: torch.Tensor, format: AffineFormat) -> Grid:
    """The grid that spans the smallest and the largest weight of each group and zero."""
    if format.group_size is None:
        low, high = (limit.float().view(1, 1) for limit in weight.aminmax())
    else:
        values = grouped(weight, group_width(format, weight.shape[1]))
        low, high = values.amin(-1), values.amax(-1)
    return grid_of_range(low, high, format, weight.dtype)


def grid_of_range(low: torch.Tensor, high: torch.Tensor, format: AffineFormat, dtype: torch.dtype) -> Grid:
    """The grid from `low` to `high`, float32 [N, G] each; a symmetric grid reaches the larger magnitude of both.

    Raises:
        ValueError: a range that is not finite in float32, which finite weights may have too."""
    if format.symmetric:
        scale = divide(torch.maximum(-low, high), format.levels / 2)
    else:
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = divide(high - low, format.levels)
    if not scale.isfinite().all():
        raise ValueError("the weight holds NaN or infinite values, or its range overflows float32")
    scale = stored(scale, dtype)
    if format.symmetric:
        return scale, torch.full(scale.shape, (format.levels + 1) / 2, device=scale.device, dtype=torch.float32)
    return scale, (-low / scale.float()).round().clamp_(0, format.levels)


def stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A scale rounded to `dtype`; 1 for a group of zeros, which error feedback then leaves alone."""
    scale = scale.to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def round_to(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, format: AffineFormat) -> torch.Tensor:
    """weight [N, K] -> uint8 codes [N, K] of the nearest points of the grid."""
    values = grouped(weight, group_width(format, weight.shape[1]))
    codes = values / scale.float()[..., None]
    if format.zero_point == "float":
        codes = codes.add_(zero[..., None]).round_()
    else:
        codes = codes.round_().add_(zero[..., None])
    codes = codes.clamp_(0, format.levels)
    return codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]]


def decode(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, format: AffineFormat) -> torch.Tensor:
    """uint8 codes [N, K] and their grid -> float32 weight [N, K]."""
    values = grouped(codes, group_width(format, codes.shape[1]))
    return values.sub_(zero[..., None]).mul_(scale.float()[..., None]).flatten(1)[:, : codes.shape[1]]


def canonical(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, format: AffineFormat) -> dict:
    """uint8 codes [N, K] and their grid -> the canonical tensors of `format`."""
    scale = scale_of_zeros(codes, scale, zero, format)
    if format.symmetric:
        return {"qweight": format.pack(codes), "scale": scale}
    zero = zero.to(scale.dtype if format.zero_point == "float" else torch.uint8)
    return {"qweight": format.pack(codes), "scale": scale, "zero_point": zero}


def scale_of_zeros(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, format: AffineFormat) -> torch.Tensor:
    """`scale` with a tiny number where `stored` put 1 for a group of zeros: kernels multiply it by what rounding leaves
    of x @ code - zero_point * sum(x)."""
    if not (scale == 1).any():
        return scale
    is_zero = (grouped(codes, group_width(format, codes.shape[1])) == zero[..., None]).all(-1)
    if format.group_size is None:
        is_zero = is_zero.all()
    return scale.masked_fill(is_zero & (scale == 1), _SCALE_OF_ZEROS)


def grid_by_rows(
    weight: torch.Tensor, format: AffineFormat, grid: Callable[[torch.Tensor], Grid], elements_at_once: int
) -> Grid:
    """The grid of weight [N, K], from `grid(rows [n, K])` called with `elements_at_once` weights at a time; once with
    the whole weight where the format has one scale per tensor."""
    if format.group_size is None:
        return grid(weight)
    parts = [grid(rows) for rows in weight.split(max(1, elements_at_once // weight.shape[1]))]
    scales, zeros = zip(*parts)
    return torch.cat(scales), torch.cat(zeros)


def quantize_rows(
    weight: torch.Tensor, format: AffineFormat, grid: Callable[[torch.Tensor], Grid], elements_at_once: int
) -> dict[str, torch.Tensor]:
    """The canonical tensors of weight [N, K] rounded to the grid of `grid_by_rows`, a piece at a time."""
    pieces = weight.split(max(1, elements_at_once // weight.shape[1]))
    if format.group_size is None:
        own = grid(weight)
        return canonical(torch.cat([round_to(rows, *own, format) for rows in pieces]), *own, format)
    parts = []
    for rows in pieces:
        own = grid(rows)
        parts.append(canonical(round_to(rows, *own, format), *own, format))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
