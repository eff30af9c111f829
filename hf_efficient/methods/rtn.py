"""Round to nearest: the grid spans the smallest and largest weight of each group (and zero), every weight takes the
nearest point of it. Tables of codes do so in their own way (`round` of the format). Needs no data."""

import torch

from hf_efficient.formats import AffineFormat, Format
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.methods._affine_grid import covering_grid, quantize_rows


FORMATS = (AffineFormat, CodebookFormat, TernaryFormat)
NEEDS = ()
_ELEMENTS_AT_ONCE = 1 << 20  # bounds the float32 copies, so that a load peaks at the weight itself


def quantize(weight: torch.Tensor, format: Format, inputs=None) -> dict[str, torch.Tensor]:
    """weight [N, K] (float16, bfloat16 or float32) -> canonical tensors of `format`, the scale in the weight's dtype.
    `inputs` are not looked at.

    Raises:
        ValueError: for a weight that holds NaN or infinite values."""
    if not isinstance(format, AffineFormat):
        return format.round(weight)
    return quantize_rows(weight, format, lambda rows: covering_grid(rows, format), _ELEMENTS_AT_ONCE)
