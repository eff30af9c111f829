"""The weights of `W8A8Config`: absmax, zero-point and vector-wise quantization of LLM.int8()
(https://arxiv.org/abs/2208.07339, section 2).

The largest magnitude (or the range) of a row, a tensor or a block spans the grid, and every weight takes the nearest
point. Where inputs were observed, columns are rounded one after another as in GPTQ (https://arxiv.org/abs/2210.17323).

float8 weights err several times more than int8 weights, so three more steps pay for them (with int8 none of them
showed). The scale is moved within an octave (twice the scale rounds alike) to the least rounding error, codes are
rounded once more among all others, and columns that stay in 16 bits make up for errors of the others."""

import torch
import torch.nn.functional as F

from hf_efficient.formats.base import divide
from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format, expand_blocks
from hf_efficient.methods._error_feedback import Feedback, damped_factor, output_error


FORMATS = (Int8Format, Float8Format)
NEEDS = ("hessian",)
_ELEMENTS_AT_ONCE = 1 << 20  # weights at a time: bounds the float32 copies
_STEPS_IN_OCTAVE = 16  # scales tried for float8
_DAMPING = 1e-3  # of the Hessian of outlier columns, in units of its mean diagonal


def quantize(weight: torch.Tensor, format: Int8Format | Float8Format, inputs=None) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. The tensors of static inputs are added by `hf_efficient.calibration.static_ranges`.

    Args:
        inputs: None: every weight takes the nearest code. The outlier columns of a format are those of the largest mean
            square; for float8, whose errors grow with the values, those of the largest share in the output.

    Raises:
        ValueError: outlier columns without inputs."""
    hessian = None if inputs is None or inputs.hessian is None else inputs.hessian.to(weight.device)
    columns = min(format.outlier_columns, weight.shape[1])
    if not columns:
        return _round(weight, format, hessian)
    if inputs is None:
        raise ValueError(f"outlier_columns={columns} are chosen by calibration: the inputs of the layer are needed")
    outliers = torch.zeros(weight.shape[1], dtype=torch.bool, device=weight.device)
    share = inputs.mean_square.to(weight.device)
    if isinstance(format, Float8Format):
        share = share * weight.float().square().sum(0)
    outliers[share.topk(columns).indices] = True
    kept, rest = weight[:, outliers], ~outliers
    if outliers.all():
        tensors = _round(torch.zeros_like(weight), format, None)
    else:
        coupling = None
        if hessian is not None:
            across = hessian[outliers][:, rest]
            kept_only, hessian = hessian[outliers][:, outliers], hessian[rest][:, rest]
            if isinstance(format, Float8Format):
                coupling = _coupling(kept_only, across)
                hessian = hessian - across.T @ coupling  # of the others, once the kept columns make up for their errors
        tensors = _round(weight[:, rest], format, hessian)
        codes = torch.zeros_like(weight, dtype=tensors["qweight"].dtype)
        codes[:, rest] = tensors["qweight"]
        if coupling is not None:
            error = weight[:, rest].float() - format.dequantize(tensors, int(rest.sum()), torch.float32)
            kept = (kept.float() + error @ coupling.T).to(weight.dtype)
        tensors["qweight"] = codes
    columns = outliers.nonzero().flatten().int()
    return {**tensors, "outlier_columns": columns, "outlier_weight": kept.contiguous()}


def _coupling(kept: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """[n, K - n]: the least-squares change of the n kept columns for a unit error of each other column. kept, between:
    the Hessian's parts [n, n] and [n, K - n]."""
    spread = kept.diagonal().sqrt()
    spread = torch.where(spread > 0, spread, 1)[:, None]
    factor = damped_factor(kept / spread / spread.T, _DAMPING)
    half = torch.linalg.solve_triangular(factor, between / spread, upper=True)
    return torch.linalg.solve_triangular(factor.T, half, upper=False) / spread


def _round(weight, format, hessian) -> dict[str, torch.Tensor]:
    scale, zero = _grid(weight, format)
    values = weight
    if hessian is not None:
        values, scale = _with_feedback(weight, hessian, scale, zero, format)
    scales, zeros = _by_weight(scale, weight, format), zero.expand(len(weight), 1)
    step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    parts = zip(values.split(step), scales.split(step), zeros.split(step))
    tensors = {"qweight": torch.cat([_encode(part.float(), s, z, format) for part, s, z in parts]), "scale": scale}
    return {**tensors, "zero_point": zero.to(torch.int8)} if getattr(format, "zero_point", False) else tensors


def _by_weight(scale, weight, format) -> torch.Tensor:
    """The scale of each weight: [N, 1], or [N, K] where blocks have scales."""
    if getattr(format, "weights", None) == "block":
        return expand_blocks(scale, *weight.shape)
    return scale.expand(len(weight), 1)


def _grid(weight, format) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale as it is stored, zero point), float32 [N, 1] or [1, 1]; the zero points of a symmetric grid are 0."""
    if not getattr(format, "zero_point", False):
        scale = _positive(divide(_sharing_a_scale(weight.abs(), format, torch.amax).float(), format.largest))
        return scale, scale.new_zeros(1, 1)
    low = -_sharing_a_scale(-weight, format, torch.amax).float().clamp_min(0)
    high = _sharing_a_scale(weight, format, torch.amax).float().clamp_min(0)
    scale = _positive(divide(high - low, 255))
    return scale, (-low / scale).round_().clamp_(0, 255).sub_(128)


def _sharing_a_scale(values, format, reduce) -> torch.Tensor:
    """`reduce` (amax or sum) over the values that share a scale: [N, K] -> the shape of the scales."""
    if getattr(format, "weights", None) == "block":
        padded = F.pad(values, (0, -values.shape[1] % BLOCK, 0, -values.shape[0] % BLOCK))
        return reduce(padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))
    values = reduce(values, 1, keepdim=True)
    by_row = format.weights == "channel" if isinstance(format, Float8Format) else format.per_channel
    return values if by_row else reduce(values, 0, keepdim=True)


def _encode(values, scale, zero, format) -> torch.Tensor:
    """float32 values -> the nearest codes."""
    if isinstance(format, Float8Format):
        return (values / scale).clamp_(-format.largest, format.largest).to(format.codes_dtype)
    return (values / scale).round_().add_(zero).clamp_(-128, 127).to(torch.int8)


def _with_feedback(weight, hessian, scale, zero, format) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight on the grid, float32 [N, K]; scale): rounded as by GPTQ, or to nearest where that changes the output
    less. The choice is made per row where rows have scales of their own."""
    zeros = zero.expand(len(weight), 1)
    feedback = Feedback(hessian)
    moved = _moved_scale(weight, scale, format, feedback.importance) if isinstance(format, Float8Format) else scale
    by_column, zero = _by_weight(moved, weight, format).T.contiguous().unbind(), zeros[:, 0].contiguous()

    def quantize_column(values, column):
        return _nearest(values, by_column[column % len(by_column)], zero, format)

    rounded = feedback.round(weight, quantize_column)
    if isinstance(format, Float8Format):
        rounded = feedback.descend(weight, rounded, quantize_column)
    plain = _nearest(weight.float(), _by_weight(scale, weight, format), zeros, format)
    error, limit = (output_error(weight, candidate, hessian) for candidate in (rounded, plain))
    if len(scale) == len(weight):
        better = (error <= limit)[:, None]
        return torch.where(better, rounded, plain), torch.where(better, moved, scale)
    return (rounded, moved) if error.sum() <= limit.sum() else (plain, scale)


def _nearest(values, scale, zero, format) -> torch.Tensor:
    """float32 values -> the nearest points of the grid."""
    return _encode(values, scale, zero, format).float().sub_(zero).mul_(scale)


def _moved_scale(weight, scale, format, importance) -> torch.Tensor:
    """`scale` times a factor from 1 to 2: that of the least rounding errors, weighed by `importance` [K]."""
    best, least = scale, None
    for step in range(_STEPS_IN_OCTAVE):
        tried = scale * 2 ** (step / _STEPS_IN_OCTAVE)
        error = _nearest(weight.float(), _by_weight(tried, weight, format), 0, format).sub_(weight).square_()
        error = _sharing_a_scale(error.mul_(importance), format, torch.sum)
        least, best = (
            (error, tried) if least is None else (torch.minimum(error, least), torch.where(error < least, tried, best))
        )
    return best


def _positive(scale: torch.Tensor) -> torch.Tensor:
    """The scale, with 1 in place of values too small to divide by."""
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
