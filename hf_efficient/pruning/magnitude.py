"""The weights of least magnitude are zeroed (https://arxiv.org/abs/1506.02626)."""

import torch

from hf_efficient.pruning.mask import Sparsity


NEEDS = ()


def prune(weight: torch.Tensor, target: Sparsity, inputs=None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (pruned weight, mask bool [N, K], True = kept)."""
    mask = target.mask(weight.abs())
    return weight.where(mask, 0), mask
