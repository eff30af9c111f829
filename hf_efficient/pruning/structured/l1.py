"""Neurons by the sum of the magnitudes of their weights (Li et al. 2017, https://arxiv.org/abs/1608.08710; here over
the whole coupled group: the rows that make a neuron and the column that reads it)."""

import torch

from hf_efficient.pruning.structured.groups import Groups


def unit_scores(groups: Groups, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """groups, weights (name of a linear -> [N, K]) of a block -> float32 [G, R], small for what may go."""
    columns = weights[groups.reader].float().abs().sum(0)
    scores = columns.cpu()[groups.columns].sum(-1)
    for name, rows in groups.own.items():
        scores += weights[name].float().abs().sum(1).cpu()[rows].sum(-1)
    return scores
