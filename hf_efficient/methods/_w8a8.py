"""Weights of `W8A8Config`: the largest magnitude (or the range) of a row, a tensor or a block spans the grid, and every weight
takes its nearest point: absmax, zero-point and vector-wise quantization of LLM.int8() (https://arxiv.org/abs/2208.07339,
section 2)."""

import torch
import torch.nn.functional as F

from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format, expand_blocks


FORMATS = (Int8Format, Float8Format)
NEEDS = ("mean_square",)  # for outlier columns alone
_ELEMENTS_AT_ONCE = 1 << 20  # bounds the float32 copies


def quantize(weight: torch.Tensor, format: Int8Format | Float8Format, inputs=None) -> dict[str, torch.Tensor]:
    """weight [N, K] (float16, bfloat16 or float32) -> canonical tensors of `format`, but for those of static inputs, which
    `hf_efficient.calibration.static_ranges` observes.

    Args:
        inputs: `LinearInputs`, for a format with outlier columns: those of the largest mean square.

    Raises:
        ValueError: outlier columns without inputs."""
    if isinstance(format, Float8Format):
        return _float8(weight, format)
    kept = {}
    if count := min(format.outlier_columns, weight.shape[1]):
        if inputs is None:
            raise ValueError(f"outlier_columns={count} are chosen by calibration: the inputs of the layer are needed")
        columns = inputs.mean_square.topk(count).indices.sort().values.to(weight.device)
        kept = {"outlier_columns": columns.int(), "outlier_weight": weight[:, columns].contiguous()}
        weight = weight.index_fill(1, columns, 0.0)
    return {**_int8(weight, format), **kept}


def _int8(weight, format: Int8Format) -> dict[str, torch.Tensor]:
    low, high = weight.amin(1, keepdim=True).float(), weight.amax(1, keepdim=True).float()
    if not format.per_channel:
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    if format.zero_point:
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = _positive((high - low) / 255)
        zero = (-low / scale).round_().clamp_(0, 255).sub_(128)
    else:
        scale = _positive(torch.maximum(-low, high) / format.largest)
        zero = torch.zeros_like(scale)
    scales, zeros = scale.expand(len(weight), 1), zero.expand(len(weight), 1)
    step, codes = _rows_at_once(weight), torch.empty_like(weight, dtype=torch.int8)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        codes[rows] = (weight[rows].float() / scales[rows]).round_().add_(zeros[rows]).clamp_(-128, 127)
    tensors = {"qweight": codes, "scale": scale}
    return {**tensors, "zero_point": zero.to(torch.int8)} if format.zero_point else tensors


def _float8(weight, format: Float8Format) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    if format.weights == "block":
        padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        largest = torch.maximum(-blocks.amin((1, 3)), blocks.amax((1, 3)))
    else:
        largest = torch.maximum(-weight.amin(1, keepdim=True), weight.amax(1, keepdim=True))
        largest = largest if format.weights == "channel" else largest.amax(0, keepdim=True)
    scale = _positive(largest.float() / format.largest)
    scales = expand_blocks(scale, rows, columns) if format.weights == "block" else scale.expand(rows, 1)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    step = _rows_at_once(weight)
    for start in range(0, rows, step):
        part = weight[start : start + step].float() / scales[start : start + step]
        codes[start : start + step] = part.clamp_(-format.largest, format.largest).to(torch.float8_e4m3fn)
    return {"qweight": codes, "scale": scale}


def _rows_at_once(weight) -> int:
    return max(1, _ELEMENTS_AT_ONCE // weight.shape[1])


def _positive(scale: torch.Tensor) -> torch.Tensor:
    """1 for what is all zeros, and for what is so small that it divides nothing."""
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
