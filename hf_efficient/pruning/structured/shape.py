"""Scores for a shape that is asked for, in the manner of Sheared LLaMA (https://arxiv.org/abs/2310.06694), from one
pass over calibration text instead of learned masks: activations times weights.

Units are scored by what the outputs of their reader lose when the other units make up for them as well as they can
(Optimal Brain Surgeon for groups, ZipLM, https://arxiv.org/abs/2302.04089), channels of the residual stream by how much
of what linears compute comes from them, layers by how little they turn the residual stream (ShortGPT,
https://arxiv.org/abs/2403.03853)."""

import torch

from hf_efficient.pruning.structured.groups import Groups


_DAMPING = 0.01  # of the mean of the diagonal, as GPTQ's
_STEPS = 64  # of many neurons several are taken at a time


def kept_units(groups: Groups, keep: tuple[int, int], weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Which units stay: bool [G, R] with keep[0] groups of keep[1] units; taken a few at a time, the others make up for
    them.

    Args:
        weight: of the reader, [N, K].
        hessian: sum of x^T x over its inputs, [K, K].
    """
    damped = hessian + _DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian)).to(hessian)
    inverse, weight = torch.linalg.inv(damped.double()).float(), weight.float().clone()
    columns = groups.columns.to(weight.device)
    kept = torch.ones(columns.shape[:2], dtype=torch.bool)
    at_once = -(-(len(kept) - keep[0]) // _STEPS)
    while (surplus := int(kept.any(1).sum()) - keep[0]) > 0:  # whole groups
        live = kept.any(1).nonzero().flatten()
        losses = _losses(weight, inverse, columns[live].flatten(1)).cpu()
        taken = live[losses.topk(min(surplus, at_once), largest=False).indices]
        kept[taken] = False
        _remove(weight, inverse, columns[taken].flatten())
    if keep[1] < columns.shape[1]:
        for group in kept.any(1).nonzero().flatten().tolist():
            for _ in range(columns.shape[1] - keep[1]):
                live = kept[group].nonzero().flatten()
                unit = live[_losses(weight, inverse, columns[group, live]).argmin().cpu()]
                kept[group, unit] = False
                _remove(weight, inverse, columns[group, unit])
    return kept


def _losses(weight: torch.Tensor, inverse: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """columns [n, C] -> [n]: the squared error that taking them costs."""
    if columns.shape[1] == 1:
        single = columns.flatten()
        return weight[:, single].square().sum(0) / inverse[single, single]
    costs = []
    for each in columns:
        part = weight[:, each]
        costs.append((part * torch.linalg.solve(inverse[each][:, each], part.T).T).sum())
    return torch.stack(costs)


def _remove(weight: torch.Tensor, inverse: torch.Tensor, columns: torch.Tensor) -> None:
    """The others make up for `columns`, in place; what is left of `inverse` there is that of the others alone."""
    rows = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])
    weight.addmm_(weight[:, columns], rows, alpha=-1)
    inverse.addmm_(inverse[:, columns], rows, alpha=-1)


def turn(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """One minus the mean cosine of tokens [..., d] before and after a block."""
    return 1 - torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean()


def kept_layers(turns: list[float], number: int) -> list[int]:
    """The layers that stay, in order: those that turn the residual stream most."""
    return sorted(torch.tensor(turns).topk(number).indices.tolist())
