"""AWQ's clipping search (https://arxiv.org/abs/2306.00978): round to nearest on ranges clipped where the output gains.

The per-channel scales of the paper are a transform of the block (`calibration/awq.py`) that comes before. Here the
groups of a row are taken one after another. Each gets the candidate range of the least output error e H e^T, where e is
the error of the whole row with the other groups as they are by then, and H the mean of x^T x. The whole range is a
candidate for every group, so the error on the calibration inputs is never above that of `rtn`."""

import torch

from hf_efficient.formats import AffineFormat
from hf_efficient.methods._affine_grid import Grid, covering_grid, group_width, grouped, quantize_rows, stored


FORMATS = (AffineFormat,)
NEEDS = ("hessian",)
_ELEMENTS_AT_ONCE = 1 << 20  # weights at a time: bounds the float32 copies
_SHRINK = [1 - step / 20 for step in range(1, 13)]  # candidate widths, as shares of the whole range
_SIDES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the cut that come off the lower end


def quantize(weight: torch.Tensor, format: AffineFormat, inputs) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. inputs: `hessian` [K, K] and `count` are read.

    Raises:
        ValueError: a weight that holds NaN or infinite values."""
    hessian = inputs.hessian.to(weight.device) / max(inputs.count, 1)
    return quantize_rows(weight, format, lambda rows: clipped_grid(rows, format, hessian), _ELEMENTS_AT_ONCE)


def rounded(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, format: AffineFormat) -> torch.Tensor:
    """weight [N, K] -> the nearest points of the grid, float32 [N, K]."""
    values = grouped(weight, group_width(format, weight.shape[1]))
    return _nearest(values, scale.float()[..., None], zero[..., None], format.levels).flatten(1)[:, : weight.shape[1]]


def clipped_grid(weight: torch.Tensor, format: AffineFormat, hessian: torch.Tensor) -> Grid:
    """The grid of weight [N, K] that the search finds; hessian: float [K, K], the mean of x^T x."""
    scale, zero = covering_grid(weight, format)
    width, values = group_width(format, weight.shape[1]), weight.float()
    error = rounded(weight, scale, zero, format) - values
    pull = error @ hessian
    for group, start in enumerate(range(0, weight.shape[1], width)):
        own = slice(start, start + width)
        others = pull[:, own] - error[:, own] @ hessian[own, own]
        best = _GroupSearch(values[:, own], others, hessian[own, own], scale[:, group], zero[:, group], format)
        for candidate in _candidates(scale[:, group], zero[:, group], format):
            best.offer(*candidate)
        pull += (best.error - error[:, own]) @ hessian[own]
        error[:, own] = best.error
        scale[:, group], zero[:, group] = best.scale, best.zero
    return scale, zero


def _candidates(scale: torch.Tensor, zero: torch.Tensor, format: AffineFormat):
    """(scale, zero point), [N] each, of one group of every row: one pair for each clipped range."""
    full = scale.float()
    for shrink in _SHRINK:
        clipped = stored(full * shrink, scale.dtype)
        if format.symmetric:
            yield clipped, zero
            continue
        lowest = zero * (full / clipped.float())  # of a grid that still reaches the smallest weight
        highest = format.levels - (format.levels - zero) * (full / clipped.float())
        for side in _SIDES:
            yield clipped, torch.lerp(lowest, highest, side).round_().clamp_(0, format.levels)


class _GroupSearch:
    """Keeps the best grid offered for one group of every row: its `scale` and `zero` [N] and the `error` [N, width]."""

    def __init__(self, values, others, hessian, scale, zero, format: AffineFormat):
        self.values, self.others, self.hessian = values, others, hessian
        self.levels, self.shared = format.levels, format.group_size is None
        self.scale, self.zero = scale, zero
        self.error, self.loss = self._try(scale, zero)

    def _try(self, scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        error = _nearest(self.values, scale.float()[:, None], zero[:, None], self.levels).sub_(self.values)
        loss = torch.addmm(self.others, error, self.hessian, beta=2).mul_(error).sum(-1)
        return error, loss.sum(0, keepdim=True) if self.shared else loss

    def offer(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Takes the grid for the rows whose output error it lowers."""
        error, loss = self._try(scale, zero)
        better = loss < self.loss
        self.scale, self.zero = torch.where(better, scale, self.scale), torch.where(better, zero, self.zero)
        self.error, self.loss = torch.where(better[:, None], error, self.error), torch.where(better, loss, self.loss)


def _nearest(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    """The points of the grids nearest to float values; scale and zero broadcast against them."""
    return (values / scale).round_().add_(zero).clamp_(0, levels).sub_(zero).mul_(scale)
