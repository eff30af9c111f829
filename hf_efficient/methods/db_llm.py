"""DB-LLM (https://arxiv.org/abs/2402.11960): two binary terms with a factor each. They begin as a grid of 2 bits, take
their least squares, and are no longer a regular grid then.

The paper trains factors by distillation; here they take their least squares for the inputs of the layer, and
`refine=True` trains them on what the block computes."""

import torch

from hf_efficient.formats.binary import DualBinaryFormat
from hf_efficient.methods._binary import by_groups, feedback_of, round_two_bits
from hf_efficient.methods._units import in_units


FORMATS = (DualBinaryFormat,)
NEEDS = ("hessian",)
_RANGES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)  # of the largest magnitude, which the first grid may cover
_PASSES = 3


def quantize(
    weight: torch.Tensor, format: DualBinaryFormat, inputs=None, damping: float = 0.01
) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. `inputs.hessian` is read.

    Raises:
        ValueError: no Hessian, or NaN or infinity in it."""
    feedback = feedback_of(inputs, "db_llm", weight.device, damping)
    weight, unit = in_units(weight)
    groups = by_groups(dual_factors, weight, feedback.importance, format.group_size)
    factors = torch.stack(groups, 2).flatten(1)  # [N, 2, G]
    tensors = round_two_bits(weight, feedback, inputs.hessian.to(weight.device), format, factors, {})
    return {**tensors, "scale": tensors["scale"] * unit}


def dual_factors(weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """The factors float32 [N, 2] for which 0, the factors and their sum are nearest to each row of weight [N, g], by
    squared errors that count as `importance` [g] says."""
    largest, best = weight.abs().amax(1), None
    for side in (1, -1):
        for share in _RANGES:
            first = side * share * largest
            found = _improved(weight, importance, first, -first / 2)
            best = found if best is None else [torch.where(found[2] < best[2], n, o) for n, o in zip(found, best)]
    return torch.stack(best[:2], 1)


def _improved(weight, importance, first, second) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first, second, squared error) after codes and factors took turns."""
    for _ in range(_PASSES):
        table = torch.stack([torch.zeros_like(first), first, second, first + second], 1)
        codes = (weight[..., None] - table[:, None]).abs_().argmin(-1)
        b, c = (codes & 1).float(), (codes >> 1).float()
        bb, cc, bc = b @ importance, c @ importance, (b * c) @ importance
        x, y = (weight * b) @ importance, (weight * c) @ importance
        determinant = bb * cc - bc * bc
        solved = (x * cc - y * bc) / determinant, (y * bb - x * bc) / determinant
        valid = (solved[0] * first > 0) & (solved[1] * second > 0)
        first, second = (torch.where(valid, new, old) for new, old in zip(solved, (first, second)))
    error = (weight - b * first[:, None] - c * second[:, None]).square() @ importance
    return first, second, error
