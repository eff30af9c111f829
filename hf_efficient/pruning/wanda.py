"""Wanda (https://arxiv.org/abs/2306.11695): the score of a weight is its magnitude times the norm of its input."""

import torch

from hf_efficient.pruning.mask import Sparsity


NEEDS = ("mean_square",)


def prune(weight: torch.Tensor, target: Sparsity, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`. inputs: `mean_square` float32 [K] is read."""
    mask = target.mask(weight.float().abs() * inputs.mean_square.sqrt().to(weight.device))
    return weight.where(mask, 0), mask
