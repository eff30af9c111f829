"""GPTQ's rounding to the entries of a codebook."""

from types import SimpleNamespace

import torch

from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.methods import kmeans
from hf_efficient.methods._error_feedback import Feedback, output_error


def quantize(weight: torch.Tensor, format: CodebookFormat, inputs, damping: float = 0.01) -> dict[str, torch.Tensor]:
    """weight [N, K] -> canonical tensors: tables and scales as kmeans chooses them for the errors that GPTQ cannot take back
    (a fixed table: the largest magnitudes for scales), codes with feedback and one descent, for `inputs.hessian` [K, K].
    On rows where that is worse than the nearest entries, those."""
    hessian = inputs.hessian.to(weight.device)
    feedback = Feedback(hessian, damping)
    if format.codebook == "kmeans":
        tensors = kmeans.quantize(weight, format, SimpleNamespace(mean_square=feedback.importance))
    else:
        tensors = format.round(weight)
    scale, table = format.scale(tensors), format.table(tensors)
    plain = format.dequantize(tensors, weight.shape[1], torch.float32)
    nearest = _columns(scale, table, format)
    rounded = feedback.descend(weight, feedback.round(weight, nearest), nearest)
    better = output_error(weight, rounded, hessian) < output_error(weight, plain, hessian)
    codes = format.nearest(torch.where(better[:, None], rounded, plain), scale, table)
    return {**tensors, "qweight": format.pack(codes)}


def _columns(scale: torch.Tensor, table: torch.Tensor, format: CodebookFormat):
    """Rounds one column to the nearest entries, for `Feedback`."""
    entries = table.sort().values
    between = (entries[:, 1:] + entries[:, :-1]) / 2
    scales = scale.t().contiguous().unbind()
    inverse = 1 / scale
    inverses = torch.where(inverse.isfinite(), inverse, 0).t().contiguous().unbind()

    def quantize_column(values: torch.Tensor, column: int) -> torch.Tensor:
        group = 0 if format.group_size in (None, -1) else column // format.group_size
        normal = values * inverses[group]
        if len(table) == 1:
            return entries[0, torch.searchsorted(between[0], normal)] * scales[group]
        places = torch.searchsorted(between, normal[:, None])
        return entries.gather(1, places)[:, 0] * scales[group]

    return quantize_column
