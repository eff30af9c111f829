"""HQQ, half-quadratic quantization (https://mobiusml.github.io/hqq_blog): needs no data. The grid of each group minimises
sum |w - q|^p with p = 0.7, which cares less for outliers than least squares does.

Alternates between the part of the error that shrinkage splits off (generalized soft thresholding) and the grid of least
squares for the rest. Integer zero points hardly move alone, so the scale is solved for too, the iteration starts at the grid
of `mse`, and the integers around the best real zero point are tried, or that one itself where the format has
zero_point="float". The best grid seen is kept, that of `rtn` among them."""

import torch

from hf_efficient.formats import AffineFormat
from hf_efficient.methods._grid import Grid, quantize_rows
from hf_efficient.methods._search import GridSearch
from hf_efficient.methods.mse import clipped_grid


FORMATS = (AffineFormat,)
NEEDS = ()
FLOAT_ZERO = True  # serves formats with zero_point="float"
_ELEMENTS_AT_ONCE = 1 << 16
_POWER = 0.7
_ROUNDS = 20
_BETA, _KAPPA = 10.0, 1.01  # weight of the quadratic term (errors in units of the scale) and its growth a round


def quantize(weight: torch.Tensor, format: AffineFormat, inputs=None) -> dict[str, torch.Tensor]:
    """weight [N, K] (float16, bfloat16 or float32) -> canonical tensors of `format`, the scale in the weight's dtype.
    `inputs` are not looked at.

    Raises:
        ValueError: for a weight that holds NaN or infinite values."""
    return quantize_rows(weight, format, lambda rows: half_quadratic_grid(rows, format), _ELEMENTS_AT_ONCE)


def half_quadratic_grid(weight: torch.Tensor, format: AffineFormat) -> Grid:
    """The grid of least sum |w - q|^p found for each group of weight [N, K]."""
    search = GridSearch(weight, format, None, _POWER)
    search.offer(*clipped_grid(weight, format))
    counted = torch.ones_like(search.values) if search.importance is None else search.importance  # 0 for padding
    if search.float_zero:
        low, high = search.values.aminmax(dim=0)
        scale = search.as_stored((high - low) / format.levels)
        search.offer(scale, _stored_zero(-low.view(scale.shape) / scale.float(), weight.dtype))
    scale, zero = (part.float().reshape(-1) for part in search.best())
    beta = _BETA
    for _ in range(_ROUNDS):
        places = search.values / scale
        centred = (places + zero).round_().clamp_(0, format.levels).sub_(zero)
        error = places - centred
        size = error.abs()
        target = places - error.sign() * (size - (size + 1e-8).pow_(_POWER - 1) / beta).clamp_min_(0)
        if not format.symmetric:
            move = ((centred - target) * counted).sum(0) / counted.sum(0)
            zero, centred = zero + move, centred - move
        ratio = (centred * target * counted).sum(0) / (centred.square() * counted).sum(0)
        scale = torch.where(ratio > 0, scale * ratio, scale)
        beta *= _KAPPA
        if search.float_zero:
            search.offer(search.as_stored(scale), _stored_zero(zero.view(search.zero.shape), weight.dtype))
            continue
        for integer in (zero,) if format.symmetric else (zero.floor(), zero.ceil()):
            integer = integer.clamp(0, format.levels).view(search.zero.shape)
            search.offer(search.as_stored(scale), integer)
    return search.best()


def _stored_zero(zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Real zero points as a weight of `dtype` holds them."""
    return zero.to(dtype).float()
