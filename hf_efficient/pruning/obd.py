"""Optimal Brain Damage (https://proceedings.neurips.cc/paper/1989/hash/6c9882bbac1c7093bd25041881277658-Abstract.html):
the weights go whose removal raises the loss least according to its diagonal Hessian, w^2 h / 2. The empirical Fisher
information, the mean square of a token's gradient, takes the place of the Hessian, because it is never negative."""

import torch

from hf_efficient.pruning.mask import Sparsity


NEEDS = ("fisher",)


def prune(weight: torch.Tensor, target: Sparsity, inputs=None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`. inputs: `fisher` float32 [N, K] is read."""
    mask = target.mask(weight.float().square() * inputs.fisher.to(weight.device))
    return weight.where(mask, 0), mask
