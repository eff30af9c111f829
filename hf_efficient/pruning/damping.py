"""The damping of a Hessian, which the methods share that move weights."""

import torch


_MOST_MEDIANS = 100


def damped(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(`hessian` float [K, K] with `damping` times its mean diagonal added to the diagonal, bool [K]: which inputs are
    not always 0; the weights of the others are pruned first). Where all are always 0, the identity and True.

    The mean counts as at most 100 times the median of the inputs that are not 0: one huge input would otherwise make
    the damping of all others larger than they are.

    Raises:
        ValueError: `hessian` is not finite.
    """
    if not hessian.isfinite().all():
        raise ValueError("the Hessian of the inputs holds NaN or infinite values")
    diagonal = hessian.diagonal()
    is_read = diagonal > 0
    if not is_read.any():
        return torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device), ~is_read
    mean = torch.minimum(diagonal.mean(), _MOST_MEDIANS * diagonal[is_read].median())
    result = hessian.clone()
    result.diagonal().add_(damping * mean)
    return result, is_read
