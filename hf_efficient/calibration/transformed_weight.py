"""The weight behind a `TransformedFormat`: what acts on the transformed input, and what acts on the plain one."""

import torch
import torch.nn.functional as F
from torch import nn

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


def product(
    x: torch.Tensor, weight: torch.Tensor, module: nn.Module, format, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """x [..., K] times a weight [N, K] that acts on the plain input, and the bias of `module`. x is rounded where
    `format` rounds its input; the gradient passes the rounding straight through."""
    if getattr(format, "input_bits", None) is not None:
        with torch.no_grad():
            scale = tensors.get("input_scale", torch.ones((), dtype=x.dtype, device=x.device))
            seen = x * scale
            seen = rotate(seen, tensors["rotation_signs"].to(x.dtype)) if format.rotation else seen
            rounded = format.rounded(seen).float()
            if format.rotation:
                rounded = unrotate_weight(rounded, tensors["rotation_signs"])
            error = (rounded / torch.where(scale == 0, 1, scale.float())).to(x.dtype) - x
        x = x + error
    return F.linear(x, weight, module.bias)
