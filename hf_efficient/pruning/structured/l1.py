"""L1 norms of neurons (Li et al. 2017, https://arxiv.org/abs/1608.08710), here over the whole coupled group: the rows
that produce a neuron and the column that reads it."""

import torch

from hf_efficient.pruning.structured.groups import Groups


def unit_scores(groups: Groups, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Scores float32 [G, R] of the units; the smallest go. weights: name of a linear in the block -> [N, K]."""
    columns = weights[groups.reader].float().abs().sum(0)
    scores = columns.cpu()[groups.columns].sum(-1)
    for name, rows in groups.own.items():
        scores += weights[name].float().abs().sum(1).cpu()[rows].sum(-1)
    return scores
