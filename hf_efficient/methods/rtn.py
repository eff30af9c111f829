"""Round to nearest: the grid of each group spans its smallest and largest weight and zero, and every weight takes the
nearest point. Formats with a codebook round in their own method `round`. Data-free."""

import torch

from hf_efficient.formats import AffineFormat, Format
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods._affine_grid import covering_grid, quantize_rows


FORMATS = (AffineFormat, CodebookFormat, TernaryFormat, TrellisFormat)
NEEDS = ()
_ELEMENTS_AT_ONCE = 1 << 20  # weights at a time: bounds the float32 copies, so that loading peaks at the weight itself


def quantize(weight: torch.Tensor, format: Format, inputs=None) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`; `inputs` is not read.

    Raises:
        ValueError: a weight that holds NaN or infinite values."""
    if not isinstance(format, AffineFormat):
        return format.round(weight)
    return quantize_rows(weight, format, lambda rows: covering_grid(rows, format), _ELEMENTS_AT_ONCE)
