"""Round to nearest on the grid of least squared error: both ends of each group's range are clipped as far as it pays.

With the inputs of the linear at hand the error of a column is weighted by its mean squared input. The smallest-to-largest
range is a candidate, so the error is never above that of `rtn`."""

import torch

from hf_efficient.formats import AffineFormat
from hf_efficient.methods._affine_grid import Grid, quantize_rows
from hf_efficient.methods._grid_search import GridSearch


FORMATS = (AffineFormat,)
NEEDS = ()
USES = ("mean_square",)
_ELEMENTS_AT_ONCE = 1 << 16  # the search passes over a piece a hundred times: keep it in the cache
_SHRINK = [0.93**step for step in range(1, 15)]  # of the width of the range; the last one keeps 36 %
_SIDES = (0.0, 0.25, 0.5, 0.75, 1.0)  # the share of what is cut that comes off the upper end
_POLISH = 4


def quantize(weight: torch.Tensor, format: AffineFormat, inputs=None) -> dict[str, torch.Tensor]:
    """weight [N, K] (float16, bfloat16 or float32) -> canonical tensors of `format`, the scale in the weight's dtype.
    `inputs` (`LinearInputs` or None): where given, `mean_square` [K] weighs the columns.

    Raises:
        ValueError: for a weight that holds NaN or infinite values."""
    importance = None if inputs is None else inputs.mean_square
    return quantize_rows(weight, format, lambda rows: clipped_grid(rows, format, importance), _ELEMENTS_AT_ONCE)


def clipped_grid(weight: torch.Tensor, format: AffineFormat, importance: torch.Tensor | None = None) -> Grid:
    """The grid of least squared error for each group of weight [N, K]; `importance` [K] weighs the columns' errors.

    A coarse search over shrunken ranges, then the scale of least squares for the codes found and the neighbouring zero
    points, as long as the error falls."""
    search = GridSearch(weight, format, importance)
    full, full_zero = search.scale.float(), search.zero
    for shrink in _SHRINK:
        scale = search.as_stored(full.reshape(-1) * shrink)
        if format.symmetric:
            search.offer(scale, full_zero)
            continue
        widening = full / scale.float()
        low, high = full_zero * widening, format.levels - (format.levels - full_zero) * widening  # keep that end
        for side in _SIDES:
            search.offer(scale, torch.lerp(low, high, side).round_().clamp_(0, format.levels))
    for _ in range(_POLISH):
        codes = search.centred_codes(search.scale, search.zero)
        weighted = codes if search.importance is None else codes * search.importance
        scale = (weighted * search.values).sum(0) / (weighted * codes).sum(0)
        search.offer(search.as_stored(scale), search.zero)
        if not format.symmetric:
            for step in (-1, 1):
                search.offer(search.scale, (search.zero + step).clamp_(0, format.levels))
    return search.best()
