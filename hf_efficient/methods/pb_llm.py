"""PB-LLM (https://arxiv.org/abs/2310.00034): the salient tenth of a weight, by the Hessian, keeps 8 bits; the others
become signs with a magnitude a row. Both are rounded with error feedback."""

import torch

from hf_efficient.formats.base import divide
from hf_efficient.formats.binary import LARGEST, PartlyBinaryFormat
from hf_efficient.methods._binary import feedback_of, in_steps
from hf_efficient.methods._error_feedback import fitted_scale
from hf_efficient.methods._units import in_units


FORMATS = (PartlyBinaryFormat,)
NEEDS = ("hessian",)


def quantize(
    weight: torch.Tensor, format: PartlyBinaryFormat, inputs=None, damping: float = 0.01
) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. `inputs.hessian` is read.

    Raises:
        ValueError: no Hessian, or NaN or infinity in it."""
    feedback = feedback_of(inputs, "pb_llm", weight.device, damping)
    weight, unit = in_units(weight)
    score = weight.float().square() * feedback.importance
    salient = torch.zeros_like(score, dtype=torch.bool, memory_format=torch.contiguous_format)
    salient.view(-1)[score.flatten().topk(format.salient(*weight.shape)).indices] = True
    scale = divide(weight.float().abs().amax(1, keepdim=True), LARGEST).to(weight.dtype)
    others = feedback.importance * ~salient
    mean = (weight.float().abs() * others).sum(1) / others.sum(1).clamp_min(1e-30)
    magnitude = in_steps(mean[:, None], scale)
    marks, step = salient.T.contiguous(), scale.float()

    def quantize_column(values: torch.Tensor, column: int) -> torch.Tensor:
        values = values[:, None]
        signed = torch.where(values < 0, -magnitude, magnitude)
        return (torch.where(marks[column][:, None], in_steps(values, step), signed) * step)[:, 0]

    rounded = feedback.descend(weight, feedback.round(weight, quantize_column), quantize_column)
    integers = in_steps(rounded, step).to(torch.int8)
    scale = fitted_scale(weight, rounded, scale, inputs.hessian.to(weight.device))
    return {**format.pack(integers, salient), "magnitude": magnitude.to(torch.int8), "scale": scale * unit}
