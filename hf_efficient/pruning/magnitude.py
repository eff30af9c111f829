"""Magnitude pruning (https://arxiv.org/abs/1506.02626): the weights of the least magnitude go."""

import torch

from hf_efficient.pruning.mask import Sparsity


NEEDS = ()


def prune(weight: torch.Tensor, target: Sparsity, inputs=None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`; `inputs` is not read."""
    mask = target.mask(weight.abs())
    return weight.where(mask, 0), mask
