"""ALPS (https://arxiv.org/abs/2406.07831): ADMM minimises the squared error of the output under a sparsity constraint,
then conjugate gradients find the least squares of the kept weights.

Columns are scaled to a unit diagonal of the Hessian H. The weight is split into X, which minimises the error, and D,
which is sparse. A multiplier V and a rising penalty rho draw both together, until the support of D, the largest |X + V
/ rho|, settles."""

import torch

from hf_efficient.pruning.damping import damped
from hf_efficient.pruning.mask import Sparsity


NEEDS = ("hessian",)
_RHO, _GROWTH = 0.1, 1.3  # the first penalty, and the factor by which it grows
_STEPS, _STEPS_A_RHO = 30, 3  # of ADMM in all, and with one penalty
_CONJUGATE_STEPS = 10


def prune(
    weight: torch.Tensor, target: Sparsity, inputs=None, damping: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`. Reads `inputs.hessian`, `damped`."""
    hessian, is_read = damped(inputs.hessian.to(weight.device), damping)
    scale = hessian.diagonal().sqrt()
    hessian /= scale[:, None] * scale
    dense = weight.float() * scale
    mask = _support(dense * is_read, hessian, target)
    pruned = least_squares(dense.where(mask, 0), dense, hessian, mask) / scale
    return pruned.where(mask, 0).to(weight.dtype), mask


def _support(dense: torch.Tensor, hessian: torch.Tensor, target: Sparsity) -> torch.Tensor:
    """The mask bool [N, K] that ADMM finds."""
    wanted, mask = dense @ hessian, target.mask(dense.abs())
    identity = torch.eye(len(hessian), device=hessian.device, dtype=torch.float32)
    sparse, multiplier, rho = dense.where(mask, 0), torch.zeros_like(dense), _RHO
    for step in range(_STEPS):
        if step % _STEPS_A_RHO == 0:
            rho *= _GROWTH if step else 1
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.add(hessian, identity, alpha=rho)))
        free = (wanted - multiplier).add_(sparse, alpha=rho) @ inverse
        shifted = free.add(multiplier, alpha=1 / rho)
        mask = target.mask(shifted.abs())
        sparse = shifted.where(mask, 0)
        multiplier.add_(free.sub_(sparse), alpha=rho)
    return mask


def least_squares(start: torch.Tensor, dense: torch.Tensor, hessian: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Conjugate gradients for min tr((dense - X) H (dense - X)^T) over X [N, K] that is zero outside `mask`, from
    `start`. The diagonal of `hessian` is 1. No row's error rises."""
    result = start.clone()
    residual = ((dense - start) @ hessian).where(mask, 0)
    direction, norm = residual.clone(), residual.square().sum(1, keepdim=True)
    for _ in range(_CONJUGATE_STEPS):
        image = (direction @ hessian).where(mask, 0)
        length = norm / (direction * image).sum(1, keepdim=True).clamp_min(torch.finfo(norm.dtype).tiny)
        result.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        before, norm = norm, residual.square().sum(1, keepdim=True)
        direction.mul_(norm / before.clamp_min(torch.finfo(norm.dtype).tiny)).add_(residual)
    return result
