"""Weights of `W8A8Config`: the largest magnitude (or the range) of a row, a tensor or a block spans the grid, and every weight
takes its nearest point: absmax, zero-point and vector-wise quantization of LLM.int8() (https://arxiv.org/abs/2208.07339,
section 2). Where the inputs are known, columns are rounded one after another as in GPTQ (https://arxiv.org/abs/2210.17323).
For floating-point grids, whose weights err several times more than int8's (where none of this showed), the grid is moved within an
octave (a scale twice as large rounds alike) to where the weights lie nearest, codes are rounded once more among all others, and
columns that stay in 16 bits take back what they can."""

import torch
import torch.nn.functional as F

from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format, expand_blocks
from hf_efficient.methods._error_feedback import Feedback, damped_factor, output_error


FORMATS = (Int8Format, Float8Format)
NEEDS = ("hessian",)
_ELEMENTS_AT_ONCE = 1 << 20  # bounds the float32 copies
_STEPS_IN_OCTAVE, _DAMPING = 16, 1e-3


def quantize(weight: torch.Tensor, format: Int8Format | Float8Format, inputs=None) -> dict[str, torch.Tensor]:
    """weight [N, K] (float16, bfloat16 or float32) -> canonical tensors of `format`, but for those of static inputs, which
    `hf_efficient.calibration.static_ranges` observes.

    Args:
        inputs: `LinearInputs`; None: the nearest codes. A format with outlier columns takes those of the largest mean square, of
            floating-point codes (whose errors grow with the numbers) those of the largest share in the output.

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
                hessian = hessian - across.T @ coupling  # what the kept columns leave
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
    """[n, K - n]: the least-squares change of n columns for a unit error of each other one, from the Hessian's [n, n] and
    [n, K - n]."""
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
    """[N, 1], or [N, K] where blocks have scales."""
    if getattr(format, "weights", None) == "block":
        return expand_blocks(scale, *weight.shape)
    return scale.expand(len(weight), 1)


def _grid(weight, format) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale as it is stored and zero point, float32 [N, 1] or [1, 1] (zeros for a symmetric grid)."""
    if not getattr(format, "zero_point", False):
        scale = _positive(_sharing_a_scale(weight.abs(), format, torch.amax).float() / format.largest)
        return scale, scale.new_zeros(1, 1)
    low = -_sharing_a_scale(-weight, format, torch.amax).float().clamp_min(0)
    high = _sharing_a_scale(weight, format, torch.amax).float().clamp_min(0)
    scale = _positive((high - low) / 255)
    return scale, (-low / scale).round_().clamp_(0, 255).sub_(128)


def _sharing_a_scale(values, format, reduce) -> torch.Tensor:
    """`reduce`, whose 0 is that of the values, over what has one scale: [N, K] -> the shape of the scales."""
    if getattr(format, "weights", None) == "block":
        padded = F.pad(values, (0, -values.shape[1] % BLOCK, 0, -values.shape[0] % BLOCK))
        return reduce(padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))
    values = reduce(values, 1, keepdim=True)
    by_row = format.weights == "channel" if isinstance(format, Float8Format) else format.per_channel
    return values if by_row else reduce(values, 0, keepdim=True)


def _encode(values, scale, zero, format) -> torch.Tensor:
    """float32 values -> the nearest codes."""
    if isinstance(format, Float8Format):
        return (values / scale).clamp_(-format.largest, format.largest).to(torch.float8_e4m3fn)
    return (values / scale).round_().add_(zero).clamp_(-128, 127).to(torch.int8)


def _with_feedback(weight, hessian, scale, zero, format) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, K] on the grid and the scale: as GPTQ rounds, or the nearest where that changes the output less, a row at
    a time where rows have scales of their own."""
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
    """float32 values -> the nearest ones of the grid."""
    return _encode(values, scale, zero, format).float().sub_(zero).mul_(scale)


def _moved_scale(weight, scale, format, importance) -> torch.Tensor:
    """Up to twice `scale`, where the rounding errors, weighed by `importance` [K], are least."""
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
    """1 for what is all zeros, and for what is so small that it divides nothing."""
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
