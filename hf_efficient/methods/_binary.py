"""What the methods of one and two bits share: rounding with error feedback to few numbers, and their least squares."""

from collections.abc import Callable

import torch

from hf_efficient.formats.binary import LARGEST
from hf_efficient.methods._error_feedback import Feedback, fitted_scale


_HEADROOM = 1.1  # how much larger than at first a factor may become by least squares
_PASSES = 2  # of least squares and descent


def feedback_of(inputs, name: str, device: torch.device, damping: float) -> Feedback:
    """The `Feedback` of a layer's inputs. Raises ValueError without a Hessian."""
    if inputs is None or inputs.hessian is None:
        raise ValueError(f"{name} needs the Hessian of the inputs: inputs.hessian is None")
    return Feedback(inputs.hessian.to(device), damping)


def steps_for(factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales [N, 1] in `dtype` with which factors, float32 [N, F], are integers of 8 bits."""
    return (factors.abs().amax(1, keepdim=True) * (_HEADROOM / LARGEST)).to(dtype)


def in_steps(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """values [N, F] -> integers in float32, of at most `LARGEST`."""
    inverse = 1 / step.float()
    return (values * torch.where(inverse.isfinite(), inverse, 0)).round_().clamp_(-LARGEST, LARGEST)


def round_two_bits(
    weight: torch.Tensor, feedback: Feedback, hessian: torch.Tensor, format, factors: torch.Tensor, own: dict
) -> dict[str, torch.Tensor]:
    """The canonical tensors of weight [N, K] in a `TwoBitFormat` that begins with `factors`, float32 [N, F].

    Codes are rounded with feedback. Then factors take their least squares for the codes, and codes are rounded by
    descent, in turn. own: what the format has besides codes, factors and scales."""
    columns, step = weight.shape[1], steps_for(factors, weight.dtype)
    factors, scale = in_steps(factors, step), step.float()
    codes = torch.arange(4, dtype=torch.uint8, device=weight.device)[:, None, None].expand(4, 1, columns)
    signs = format.signs(codes, own)  # of the four codes [4, 1, K]
    nearest = _Nearest(signs, format, factors, scale)
    rounded = feedback.round(weight, nearest)
    for _ in range(_PASSES):
        each = format.signs(nearest.all_codes(), own)
        factors = _least_squares(weight, each, format, factors, scale, hessian)
        expanded = format.expanded(factors * scale, columns)
        rounded = sum(sign * factor for sign, factor in zip(each, expanded))
        nearest = _Nearest(signs, format, factors, scale)
        rounded = feedback.descend(weight, rounded, nearest)
    own = {"factors": factors.to(torch.int8), "scale": fitted_scale(weight, rounded, step, hessian), **own}
    integers = format.integers({"qweight": format.pack(nearest.all_codes()), **own}, columns)
    return {"qweight": format.codes_of(integers, own), **own}


class _Nearest:
    """A `QuantizeColumn` that keeps the codes it chose."""

    def __init__(self, signs, format, factors, scale):
        columns = signs[0].shape[-1]
        factors = [factor.T for factor in format.expanded(factors * scale, columns)]  # [K or 1, N]
        self.factors, self.signs = factors, [sign[:, 0].T.float()[..., None] for sign in signs]  # [K, 4, 1]
        self.codes: dict[int, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor, column: int) -> torch.Tensor:
        each = zip(self.signs, self.factors)
        table = sum(sign[column] * factor[column if len(factor) > 1 else 0] for sign, factor in each)  # [4, N]
        code = (table - values).abs_().argmin(0)
        self.codes[column] = code.to(torch.uint8)
        return table.gather(0, code[None])[0]

    def all_codes(self) -> torch.Tensor:
        return torch.stack([self.codes[column] for column in range(len(self.codes))], 1)


def _least_squares(weight, signs, format, factors, scale, hessian) -> torch.Tensor:
    """Each factor in turn, in float32 integers, at its least output error for the codes, where it keeps its sign."""
    columns, groups = weight.shape[1], format.groups(weight.shape[1])
    width = columns if groups == 1 else format.group_size
    expanded = format.expanded(factors * scale, columns)
    error = weight.float() - sum(sign * factor for sign, factor in zip(signs, expanded))
    factors = factors.clone()
    for kind, sign in enumerate(signs):
        for group in range(groups):
            part = slice(group * width, min((group + 1) * width, columns))
            own, index = sign[:, part].float(), kind * groups + group
            slope = ((error @ hessian[:, part]) * own).sum(1)
            curvature = ((own @ hessian[part, part]) * own).sum(1)
            old = factors[:, index]
            new = in_steps((old * scale[:, 0] + slope / curvature)[:, None], scale)[:, 0]
            change = (new - old) * scale[:, 0]
            better = (change * (change * curvature - 2 * slope) < 0) & (new * old > 0)
            factors[:, index] = torch.where(better, new, old)
            error[:, part] -= torch.where(better, change, 0)[:, None] * own
    return factors


def by_groups(fit: Callable, weight: torch.Tensor, importance: torch.Tensor, group_size: int) -> list:
    """[fit(float32 weight [N, g], importance [g])] of all groups."""
    width = weight.shape[1] if group_size == -1 else group_size
    return [fit(*pair) for pair in zip(weight.float().split(width, 1), importance.split(width))]
