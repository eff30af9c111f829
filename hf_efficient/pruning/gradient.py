"""First-order saliency (https://arxiv.org/abs/1906.10771; absolute values of the gradients of samples as in
https://arxiv.org/abs/2311.04902): the weights go whose removal changes the loss least to first order, |w g|."""

import torch

from hf_efficient.pruning.mask import Sparsity


NEEDS = ("gradient",)


def prune(weight: torch.Tensor, target: Sparsity, inputs=None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`. inputs: `gradient` float32 [N, K] is read."""
    mask = target.mask(weight.float().abs() * inputs.gradient.to(weight.device))
    return weight.where(mask, 0), mask
