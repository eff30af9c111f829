"""GPTQ (https://arxiv.org/abs/2210.17323): columns are rounded one after another, by falling mean squared input
(act-order), and the columns still to come make up for what rounding a column did to the output.

Scales and zero points are chosen before (static groups), so the format needs no index of groups. Beyond the paper,
ranges are clipped for the least error that later columns cannot make up for (`Feedback.importance`). Then coordinate
descent rounds each column once more among all others, the scales take their least squares for the codes, and the
descent runs again. A row that ends up worse than round to nearest is rounded to nearest."""

import torch

from hf_efficient.formats import AffineFormat, Format
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods import _gptq_codebook, _gptq_trellis
from hf_efficient.methods._affine_grid import (
    Grid,
    canonical,
    covering_grid,
    decode,
    grid_by_rows,
    group_width,
    round_to,
    stored,
)
from hf_efficient.methods._error_feedback import Feedback, output_error
from hf_efficient.methods.mse import clipped_grid


FORMATS = (AffineFormat, CodebookFormat, TrellisFormat)
NEEDS = ("hessian",)
MASKED = True
_ELEMENTS_AT_ONCE = 1 << 16  # weights at a time in the search for grids


def quantize(
    weight: torch.Tensor, format: Format, inputs=None, damping: float = 0.01, act_order: bool = True, mask=None
) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`.

    Args:
        inputs: `hessian` float32 [K, K] is read.
        damping: added to the diagonal of the Hessian, in units of its mean; see `Feedback`.
        act_order: whether columns are visited by falling diagonal of the Hessian.
        mask: bool [N, K] of a pruned weight, True = kept: the others stay 0, and only kept weights make up for errors.
            For affine formats.

    Raises:
        ValueError: NaN or infinite values in the weight or the Hessian, or no Hessian."""
    if inputs is None or inputs.hessian is None:
        raise ValueError("gptq needs the Hessian of the inputs: inputs.hessian is None")
    if isinstance(format, CodebookFormat):
        return _gptq_codebook.quantize(weight, format, inputs, damping)
    if isinstance(format, TrellisFormat):
        return _gptq_trellis.quantize(weight, format, inputs, damping)
    hessian = inputs.hessian.to(weight.device)
    nearest = covering_grid(weight, format)
    feedback = Feedback(hessian, damping, act_order)
    grid = grid_by_rows(weight, format, lambda r: clipped_grid(r, format, feedback.importance), _ELEMENTS_AT_ONCE)
    rounded = feedback.round(weight, _columns(grid, format, mask))
    rounded = feedback.descend(weight, rounded, _columns(grid, format, mask))
    if format.group_size is not None:
        grid, rounded = _least_squares_scales(weight, rounded, grid, hessian, format)
        rounded = feedback.descend(weight, rounded, _columns(grid, format, mask))
    codes, plain = round_to(rounded, *grid, format), round_to(weight, *nearest, format)
    error = output_error(weight, rounded, hessian)
    limit = output_error(weight, decode(plain, *nearest, format), hessian)
    better = (error <= limit)[:, None] if format.group_size is not None else error.sum() <= limit.sum()
    grid = (torch.where(better, ours, theirs) for ours, theirs in zip(grid, nearest))
    return canonical(torch.where(better, codes, plain), *grid, format)


def _columns(grid: Grid, format: AffineFormat, mask: torch.Tensor | None = None):
    """A `QuantizeColumn` for `Feedback` that rounds to `grid`."""
    scale, zero = (part.float().T.contiguous() for part in grid)
    width = None if format.group_size in (None, -1) else format.group_size
    scales, lows, highs = scale.unbind(), (-zero).unbind(), (format.levels - zero).unbind()

    def quantize_column(values: torch.Tensor, column: int) -> torch.Tensor:
        group = 0 if width is None else column // width
        return (values / scales[group]).round_().clamp_(lows[group], highs[group]).mul_(scales[group])

    if mask is None:
        return quantize_column
    kept = mask.T.contiguous().unbind()
    return lambda values, column: quantize_column(values, column).mul_(kept[column])


def _least_squares_scales(
    weight: torch.Tensor, rounded: torch.Tensor, grid: Grid, hessian: torch.Tensor, format: AffineFormat
) -> tuple[Grid, torch.Tensor]:
    """(grid, dequantized weight) after each group's scale in turn took its least squares for the codes, as it is
    stored, where that lowers the output error."""
    (scale, zero), width = grid, group_width(format, weight.shape[1])
    error, scale = weight.float() - rounded, scale.clone()
    for group, start in enumerate(range(0, weight.shape[1], width)):
        columns, old = slice(start, start + width), scale[:, group].float()
        codes = (rounded[:, columns] / old[:, None]).round_()
        slope = ((error @ hessian[:, columns]) * codes).sum(1)
        curvature = ((codes @ hessian[columns, columns]) * codes).sum(1)
        new = stored(old + slope / curvature, weight.dtype)
        step = new.float() - old
        # False (NaN) where no output depends on the group
        better = (new > 0) & (step * (step * curvature - 2 * slope) < 0)
        step = torch.where(better, step, 0)
        scale[:, group] = torch.where(better, new, scale[:, group])
        error[:, columns].addcmul_(codes, step[:, None], value=-1)
    return (scale, zero), weight.float() - error
