"""Weights so large or so small that their squares are no ordinary floats, in other units."""

import math

import torch


_ORDINARY = 30  # powers of two up and down, so that products of two weights and a Hessian neither overflow nor vanish
_LEAST = -100  # beyond it the reciprocal of a unit would overflow


def in_units(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    """weight [N, K] -> (`weight / unit` of the same dtype, the unit, a power of two). The unit of a weight whose
    squares are ordinary floats is 1, and so are those of all weights in float16."""
    largest = weight.abs().amax().item()
    power = math.frexp(largest)[1]
    if largest == 0 or abs(power) <= _ORDINARY:
        return weight, 1.0
    unit = 2.0 ** max(power - 1, _LEAST)
    return weight / unit, unit
