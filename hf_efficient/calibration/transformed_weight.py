"""The weight behind a `TransformedFormat`: what acts on the transformed input, and what acts on the plain one."""

import torch

from hf_efficient.kernels.hadamard import rotate, unrotate_weight


def to_stored(weight: torch.Tensor, format, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A float32 weight [N, K] that acts on the plain input -> the one that acts on the input of `format`, whose
    canonical tensors are `tensors`."""
    if getattr(format, "input_scale", False):
        weight = weight / tensors["input_scale"].float()
    if getattr(format, "rotation", False):
        weight = rotate(weight, tensors["rotation_signs"])
    return weight


def to_plain(weight: torch.Tensor, format, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The inverse of `to_stored`."""
    if getattr(format, "rotation", False):
        weight = unrotate_weight(weight, tensors["rotation_signs"])
    if getattr(format, "input_scale", False):
        weight = weight * tensors["input_scale"].float()
    return weight
