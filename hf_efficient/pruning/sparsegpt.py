"""SparseGPT (https://arxiv.org/abs/2301.00774): columns are pruned from left to right, and the columns still to come
make up for what that did to the output.

Which weights of a block of columns stay is decided when the block is reached, by the error that zeroing each causes
after that: w^2 / [U]_kk^2, H^-1 = U^T U. In a block of 128 columns all weights compete ("layer", as in the paper) or
those of each row ("row"); with an n:m pattern the m neighbours do."""

import torch

from hf_efficient.methods._error_feedback import Feedback
from hf_efficient.pruning.damping import damped
from hf_efficient.pruning.mask import Sparsity, keep_largest


NEEDS = ("hessian",)
GROUP = "layer"
_BLOCK = 128  # columns


def prune(weight: torch.Tensor, target: Sparsity, inputs, damping: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_efficient.pruning`. Reads `inputs.hessian`, `damped`."""
    hessian, is_read = damped(inputs.hessian.to(weight.device), damping)
    feedback = Feedback(hessian, 0.0, act_order=False)
    importance = feedback.importance * is_read
    rows, columns = weight.shape
    mask = torch.empty(columns, rows, dtype=torch.bool, device=weight.device)
    per_group = target.competitors(rows, columns)[1]

    def choose(values: torch.Tensor, start: int) -> None:
        end = start + values.shape[1]
        scores = values.square() * importance[start:end]
        if target.pattern:
            kept = keep_largest(scores, per_group)
        else:
            share = round(per_group * end / columns) - round(per_group * start / columns)
            kept = keep_largest(scores if target.group == "row" else scores.reshape(1, -1), share)
        mask[start:end] = kept.view(scores.shape).T

    every = target.pattern[1] if target.pattern else _BLOCK
    pruned = feedback.round(weight, lambda values, column: values * mask[column], choose, every)
    return pruned.to(weight.dtype), mask.T.contiguous()
