"""Optimal Brain Surgeon, exact (https://papers.nips.cc/paper/1992/hash/303ed4c69846ab36c2904d3ba8573050-Abstract.html;
row by row as in https://arxiv.org/abs/2208.11580): weights are removed one at a time, each time the one whose removal
costs the output least after all weights left take their least squares. For small layers, and as the reference for other
methods."""

import torch

from hf_efficient.pruning.damping import damped
from hf_efficient.pruning.mask import Sparsity


NEEDS = ("hessian",)
MOST_ELEMENTS = 1 << 27  # of the inverse Hessians of all rows: 1 GiB in float64


def prune(
    weight: torch.Tensor, target: Sparsity, inputs=None, damping: float = 1e-4
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`; in float64. Reads `inputs.hessian`, `damped`.

    Raises ValueError: the layer is too large (N K^2 above 2^27), or the damped Hessian is not positive definite.
    """
    rows, columns = weight.shape
    if rows * columns**2 > MOST_ELEMENTS:
        raise ValueError(
            f"obs is exact and for small layers: a weight [{rows}, {columns}] needs the inverses of {rows} Hessians of "
            f"{columns}^2, and N K^2 may be at most {MOST_ELEMENTS}; use 'sparsegpt' or 'alps'"
        )
    hessian, is_read = damped(inputs.hessian.to(weight.device).double(), damping)
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        raise ValueError("the Hessian of the inputs is not positive definite: raise damping")
    inverse = torch.cholesky_inverse(factor).repeat(rows, 1, 1)
    pruned = weight.double().clone()
    mask = torch.ones_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)
    count, kept = target.competitors(rows, columns)
    quota = torch.full((rows * columns // count,), count - kept, device=weight.device)  # left to remove, per group
    while quota.any():
        open = mask & (quota > 0).repeat_interleave(count).view_as(mask)
        cost = (pruned.square() * is_read / inverse.diagonal(dim1=1, dim2=2)).masked_fill_(~open, torch.inf)
        if target.pattern is None and target.group == "layer":
            chosen = cost.argmin()[None]
        else:  # rows are independent: one weight of each row
            chosen = cost.argmin(1) + torch.arange(rows, device=weight.device) * columns
        _remove(pruned, inverse, chosen // columns, chosen % columns)
        mask.view(-1)[chosen] = False
        quota -= torch.bincount(chosen // count, minlength=len(quota))
    return pruned.where(mask, 0).to(weight.dtype), mask


def _remove(weight: torch.Tensor, inverse: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Removes weight `columns[i]` of row `rows[i]` and updates the others of the row, in place. weight: [N, K];
    inverse: [N, K, K], for each row the inverse Hessian of the columns left."""
    line = inverse[rows, columns]
    pivot = line.gather(1, columns[:, None])
    weight[rows] -= weight[rows, columns][:, None] / pivot * line
    inverse[rows] -= (line / pivot)[:, :, None] * line[:, None, :]
    inverse[rows, columns] = inverse[rows, :, columns] = 0
    inverse[rows, columns, columns] = 1  # avoids division by zero; a removed weight is not chosen again
