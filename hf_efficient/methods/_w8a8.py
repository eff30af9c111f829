"""Weights of `W8A8Config`: the largest magnitude (or the range) of a row, a tensor or a block spans the grid, and every weight
takes its nearest point: absmax, zero-point and vector-wise quantization of LLM.int8() (https://arxiv.org/abs/2208.07339,
section 2). Where the inputs are known, columns are rounded one after another as in GPTQ (https://arxiv.org/abs/2210.17323)."""

import torch
import torch.nn.functional as F

from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format, expand_blocks
from hf_efficient.methods._feedback import output_error, round_with_feedback


FORMATS = (Int8Format, Float8Format)
NEEDS = ("hessian",)
_ELEMENTS_AT_ONCE = 1 << 20  # bounds the float32 copies


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
    kept = {
        "outlier_columns": outliers.nonzero().flatten().int(),
        "outlier_weight": weight[:, outliers].contiguous(),
    }
    if outliers.all():
        return {**_round(torch.zeros_like(weight), format, None), **kept}
    rest = _round(weight[:, ~outliers], format, None if hessian is None else hessian[~outliers][:, ~outliers])
    codes = torch.zeros_like(weight, dtype=rest["qweight"].dtype)
    codes[:, ~outliers] = rest["qweight"]
    return {**rest, "qweight": codes, **kept}


def _round(weight, format, hessian) -> dict[str, torch.Tensor]:
    scale, zero = _grid(weight, format)
    rows, columns = weight.shape
    blocks = getattr(format, "weights", None) == "block"
    scales = expand_blocks(scale, rows, columns) if blocks else scale.expand(rows, 1)
    zeros = zero.expand(rows, 1)
    if hessian is not None:
        weight = _with_feedback(weight, hessian, scales, zeros, format)
    step = max(1, _ELEMENTS_AT_ONCE // columns)
    parts = zip(weight.split(step), scales.split(step), zeros.split(step))
    tensors = {"qweight": torch.cat([_encode(part.float(), s, z, format) for part, s, z in parts]), "scale": scale}
    return {**tensors, "zero_point": zero.to(torch.int8)} if getattr(format, "zero_point", False) else tensors


def _grid(weight, format) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale as it is stored and zero point, float32 [N, 1] or [1, 1] (zeros for a symmetric grid)."""
    if getattr(format, "weights", None) == "block":
        padded = F.pad(weight, (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = _positive(blocks.abs().amax((1, 3)).float() / format.largest)
        return scale, scale.new_zeros(1, 1)
    low, high = weight.amin(1, keepdim=True).float(), weight.amax(1, keepdim=True).float()
    if not (format.weights == "channel" if isinstance(format, Float8Format) else format.per_channel):
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    if getattr(format, "zero_point", False):
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = _positive((high - low) / 255)
        return scale, (-low / scale).round_().clamp_(0, 255).sub_(128)
    scale = _positive(torch.maximum(-low, high) / format.largest)
    return scale, torch.zeros_like(scale)


def _encode(values, scale, zero, format) -> torch.Tensor:
    """float32 values -> the nearest codes."""
    if isinstance(format, Float8Format):
        return (values / scale).clamp_(-format.largest, format.largest).to(torch.float8_e4m3fn)
    return (values / scale).round_().add_(zero).clamp_(-128, 127).to(torch.int8)


def _with_feedback(weight, hessian, scales, zeros, format) -> torch.Tensor:
    """float32 [N, K] on the grid: each row as GPTQ rounds it, or the nearest where that changes its output less."""

    def nearest(values, scale, zero):
        return _encode(values, scale, zero, format).float().sub_(zero).mul_(scale)

    by_column, zero = scales.T.contiguous().unbind(), zeros[:, 0].contiguous()
    rounded = round_with_feedback(
        weight, hessian, lambda values, column: nearest(values, by_column[column % len(by_column)], zero)
    )
    plain = nearest(weight.float(), scales, zeros)
    better = output_error(weight, rounded, hessian) <= output_error(weight, plain, hessian)
    return torch.where(better[:, None], rounded, plain)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    """1 for what is all zeros, and for what is so small that it divides nothing."""
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
