"""GPTQ (https://arxiv.org/abs/2210.17323) with a codebook in place of a grid."""

from types import SimpleNamespace

import torch

from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.methods import kmeans
from hf_efficient.methods._error_feedback import Feedback, output_error


def quantize(weight: torch.Tensor, format: CodebookFormat, inputs, damping: float = 0.01) -> dict[str, torch.Tensor]:
    """The canonical tensors of weight [N, K] for the inputs' `hessian` [K, K].

    Learned tables and scales are those of `kmeans`, with columns weighed by the errors that GPTQ cannot make up for,
    the damping left out; with a fixed table those of `CodebookFormat.round`. Codes come from error feedback and one
    descent. Rows where that is worse than the nearest entries get those."""
    hessian = inputs.hessian.to(weight.device)
    feedback = Feedback(hessian, damping)
    # beside an input that is thousands of times larger, damping would be most of what other columns weigh
    importance = (feedback.importance - damping * hessian.diagonal().mean()).clamp_min_(0)
    if format.codebook == "kmeans":
        tensors = kmeans.quantize(weight, format, SimpleNamespace(mean_square=importance))
    else:
        tensors = format.round(weight, importance)
    scale, table = format.scale(tensors), format.table(tensors)
    plain = format.dequantize(tensors, weight.shape[1], torch.float32)
    nearest = _columns(scale, table, format)
    rounded = feedback.descend(weight, feedback.round(weight, nearest), nearest)
    better = output_error(weight, rounded, hessian) < output_error(weight, plain, hessian)
    codes = format.nearest(torch.where(better[:, None], rounded, plain), scale, table)
    return {**tensors, "qweight": format.pack(codes)}


def _columns(scale: torch.Tensor, table: torch.Tensor, format: CodebookFormat):
    """A `QuantizeColumn` for `Feedback` that rounds to the nearest entries of the table."""
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
        nearest = torch.searchsorted(between, normal[:, None])
        return entries.gather(1, nearest)[:, 0] * scales[group]

    return quantize_column
