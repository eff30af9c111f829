"""Round to nearest: the grid spans the smallest and largest weight of each group (and zero), every weight takes the
nearest point of it. Needs no data."""

import torch
import torch.nn.functional as F

from hf_efficient.formats import AffineFormat


_ELEMENTS_AT_ONCE = 1 << 20  # bounds the float32 copies, so that a load peaks at the weight itself


def quantize(weight: torch.Tensor, format: AffineFormat) -> dict[str, torch.Tensor]:
    """weight [N, K] (float16, bfloat16 or float32) -> canonical tensors of `format`, the scale in the weight's dtype.
    Codes are chosen against the rounded scale, as it is stored."""
    rows, columns = weight.shape
    limits = None
    if format.group_size is None:
        limits = _range(torch.stack(weight.aminmax()).float()[None, None], format)
    step = max(1, _ELEMENTS_AT_ONCE // columns)
    parts = [_quantize_rows(chunk, format, limits) for chunk in weight.split(step)]
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if format.group_size is None:
        tensors = {name: t if name == "qweight" else t[:1].clone() for name, t in tensors.items()}
    return tensors


def _range(grouped: torch.Tensor, format: AffineFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """float [N, G, g] -> the scale and zero point that cover each group, float32 [N, G]."""
    low, high = grouped.amin(-1), grouped.amax(-1)
    if format.symmetric:
        scale = torch.maximum(-low, high) / (format.levels / 2)
    else:
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = (high - low) / format.levels
    return scale, low


def _quantize_rows(weight: torch.Tensor, format: AffineFormat, limits) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    group = columns if format.group_size in (None, -1) else min(format.group_size, columns)
    grouped = weight.float()
    if columns % group:  # repeating the last column widens no range
        grouped = F.pad(grouped[None], (0, -columns % group), mode="replicate")[0]
    grouped = grouped.unflatten(1, (-1, group))
    scale, low = _range(grouped, format) if limits is None else (t.expand(rows, 1) for t in limits)
    stored = scale.to(weight.dtype)
    stored = torch.where(stored == 0, torch.ones_like(stored), stored)  # a group of zeros
    scale = stored.float()
    if format.symmetric:
        zero = torch.full_like(scale, (format.levels + 1) / 2)
    else:
        zero = (-low / scale).round().clamp_(0, format.levels)
    codes = (grouped / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, format.levels)
    codes = codes.to(torch.uint8).flatten(1)[:, :columns]
    tensors = {"qweight": format.pack(codes), "scale": stored}
    return tensors if format.symmetric else {**tensors, "zero_point": zero.to(torch.uint8)}
