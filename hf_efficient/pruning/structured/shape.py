"""Pruning to a given shape, as Sheared LLaMA (https://arxiv.org/abs/2310.06694) does, but with scores from one pass
over calibration text in place of learned masks.

Units are scored by the error of their reader's outputs after the other units make up for them (Optimal Brain Surgeon
for groups; ZipLM, https://arxiv.org/abs/2302.04089). Channels of the residual stream are scored by their share in the
outputs of the linears that read it, and layers by how much they turn the residual stream (ShortGPT,
https://arxiv.org/abs/2403.03853)."""

import torch

from hf_efficient.pruning.structured.groups import Groups


_DAMPING = 0.01  # of the mean of the diagonal of the Hessian, as in GPTQ
_STEPS = 64  # most steps; of many groups several go in one step


def kept_units(groups: Groups, keep: tuple[int, int], weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """bool [G, R]: keep[0] groups of keep[1] units each stay. Units go a few at a time, and the others make up for
    them. weight: [N, K], of the reader. hessian: [K, K], the sum of x^T x over its inputs."""
    damped = hessian + _DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian)).to(hessian)
    inverse, weight = torch.linalg.inv(damped.double()).float(), weight.float().clone()
    columns = groups.columns.to(weight.device)
    kept = torch.ones(columns.shape[:2], dtype=torch.bool)
    at_once = -(-(len(kept) - keep[0]) // _STEPS)
    while (surplus := int(kept.any(1).sum()) - keep[0]) > 0:  # whole groups
        live = kept.any(1).nonzero().flatten()
        losses = _losses(weight, inverse, columns[live].flatten(1)).cpu()
        gone = live[losses.topk(min(surplus, at_once), largest=False).indices]
        kept[gone] = False
        _remove(weight, inverse, columns[gone].flatten())
    if keep[1] < columns.shape[1]:
        for group in kept.any(1).nonzero().flatten().tolist():
            for _ in range(columns.shape[1] - keep[1]):
                live = kept[group].nonzero().flatten()
                unit = live[_losses(weight, inverse, columns[group, live]).argmin().cpu()]
                kept[group, unit] = False
                _remove(weight, inverse, columns[group, unit])
    return kept


def _losses(weight: torch.Tensor, inverse: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """columns [n, C] -> [n]: the squared error of the outputs without each set of columns, after the others make up for
    it."""
    if columns.shape[1] == 1:
        single = columns.flatten()
        return weight[:, single].square().sum(0) / inverse[single, single]
    costs = []
    for each in columns:
        part = weight[:, each]
        costs.append((part * torch.linalg.solve(inverse[each][:, each], part.T).T).sum())
    return torch.stack(costs)


def _remove(weight: torch.Tensor, inverse: torch.Tensor, columns: torch.Tensor) -> None:
    """Removes `columns`: the others of `weight` make up for them, and `inverse` becomes that of the others, in
    place."""
    rows = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])
    weight.addmm_(weight[:, columns], rows, alpha=-1)
    inverse.addmm_(inverse[:, columns], rows, alpha=-1)


def turn(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """One minus the mean cosine similarity of tokens [..., d] before and after a block."""
    return 1 - torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean()


def kept_layers(turns: list[float], number: int) -> list[int]:
    """The `number` layers that turn the residual stream most, in order."""
    return sorted(torch.tensor(turns).topk(number).indices.tolist())
