"""GPTQ (https://arxiv.org/abs/2210.17323) with a trellis in place of a grid: LDLQ with Viterbi's search, as in QTIP
(https://arxiv.org/abs/2406.11235).

A sequence of the trellis runs down a column, so that a column is rounded as a whole and its error is fed back before
the next one, where QTIP feeds back the error of 16 columns at once."""

import torch

from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods._error_feedback import Feedback, fitted_scale


def quantize(weight: torch.Tensor, format: TrellisFormat, inputs, damping: float = 0.01) -> dict[str, torch.Tensor]:
    """The canonical tensors of weight [N, K] for the inputs' `hessian` [K, K].

    Columns are rounded with feedback, then the scales take their least squares for the values. Descent afterwards, as
    for grids, finds nothing: the columns behind have made up for the error of each, so that its path stays nearest."""
    hessian = inputs.hessian.to(weight.device)
    scale = format.scale(weight)
    columns = _Columns(scale, format)
    rounded = Feedback(hessian, damping).round(weight, columns)
    codes = torch.stack([columns.codes[column] for column in range(weight.shape[1])], 1)
    return {"qweight": format.pack(codes), "scale": fitted_scale(weight, rounded, scale, hessian)}


class _Columns:
    """A `QuantizeColumn` for `Feedback` that keeps the codes: column -> uint8 [rows of whole bands]."""

    def __init__(self, scale: torch.Tensor, format: TrellisFormat):
        self.scale, self.format, self.codes = scale, format, {}

    def __call__(self, values: torch.Tensor, column: int) -> torch.Tensor:
        codes, rounded = self.format.nearest(values[:, None], self.scale)
        self.codes[column] = codes[:, 0]
        return rounded[:, 0]
