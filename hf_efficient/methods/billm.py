"""BiLLM (https://arxiv.org/abs/2402.04291): salient columns by the Hessian get two binary terms, all other weights a
sign and one of two magnitudes, split where the squared error is least.

Two binary terms are a sign and one of two magnitudes as well, so every weight is stored in 2 bits. The paper's 1.1 bits
count signs alone, not which part of the split a weight belongs to. Beyond the paper, a weight takes the number that is
nearest when its column comes, and magnitudes take their least squares."""

import torch

from hf_efficient.formats.binary import SplitBinaryFormat
from hf_efficient.methods._binary import by_groups, feedback_of, round_two_bits
from hf_efficient.methods._units import in_units


FORMATS = (SplitBinaryFormat,)
NEEDS = ("hessian",)
_SALIENT = (0, 2, 4, 8, 16, 32)  # columns of 128 that may be salient
_SPLITS = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5)  # where magnitudes are split, in units of their mean


def quantize(
    weight: torch.Tensor, format: SplitBinaryFormat, inputs=None, damping: float = 0.01
) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. `inputs.hessian` is read.

    Raises:
        ValueError: no Hessian, or NaN or infinity in it."""
    feedback = feedback_of(inputs, "billm", weight.device, damping)
    weight, unit = in_units(weight)
    groups = by_groups(_fit, weight, feedback.importance, format.group_size)
    salient = torch.cat([marks for marks, _ in groups])
    factors = torch.stack([magnitudes for _, magnitudes in groups], 2).flatten(1)  # [N, 4, G]
    own = {"salient": format.pack_salient(salient)}
    tensors = round_two_bits(weight, feedback, inputs.hessian.to(weight.device), format, factors, own)
    return {**tensors, "scale": tensors["scale"] * unit}


def _fit(weight: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(which columns of weight [N, g] are salient, bool [g]; magnitudes [N, 4])."""
    order = (weight.square().sum(0) * importance).argsort(descending=True)
    best, magnitudes = None, weight.abs()
    for count in _SALIENT:
        marks = torch.zeros_like(importance, dtype=torch.bool)
        marks[order[: count * len(order) // 128]] = True
        error = sum(split_magnitudes(magnitudes, importance * part, (1.0,))[2].sum() for part in (marks, ~marks))
        if best is None or error < best[0]:
            best = error, marks
    parts = [split_magnitudes(magnitudes, importance * part, _SPLITS)[:2] for part in (best[1], ~best[1])]
    return best[1], torch.stack([*parts[0], *parts[1]], 1)


def split_magnitudes(
    magnitudes: torch.Tensor, importance: torch.Tensor, splits: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two numbers that are nearest to each row's magnitudes.

    Args:
        magnitudes: float32 [N, g].
        importance: float32 [g], of the squared errors; 0 where a column does not count.
        splits: those of the means of rows at which they may be split.

    Returns:
        (the smaller, the larger number, the squared error), float32 [N] each."""
    weighted = magnitudes * importance
    count, total = importance.sum(), weighted.sum(1)
    squares, mean = (weighted * magnitudes).sum(1), total / count.clamp_min(1e-30)
    best = None
    for split in splits:
        large = magnitudes > split * mean[:, None]
        upper, upper_count = (weighted * large).sum(1), large.float() @ importance
        lower, lower_count = total - upper, count - upper_count
        high, low = (x / n.clamp_min(1e-30) for x, n in ((upper, upper_count), (lower, lower_count)))
        found = low, torch.maximum(high, low), squares - high * upper - low * lower
        best = found if best is None else [torch.where(found[2] < best[2], n, o) for n, o in zip(found, best)]
    return tuple(best)
