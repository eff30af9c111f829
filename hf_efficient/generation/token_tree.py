"""Token trees: several continuations of a row in one forward, sharing their beginnings."""

import torch


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """parents: int64 [rows, width], -1 for those that follow the root, and a parent stands before its children.

    Returns bool [rows, width + 1, width + 1] over the root and the nodes: whether each descends from the other, itself
    included. Row i is what node i sees, and its sum is one more than the node's depth."""
    rows, width = parents.shape
    reach = torch.eye(width + 1, device=parents.device).repeat(rows, 1, 1)
    reach[:, 1:].scatter_(2, (parents + 1)[..., None], 1.0)
    steps = 1
    while steps < width + 1:  # paths twice as long each time
        reach = (reach @ reach).clamp_(max=1)
        steps *= 2
    return reach > 0
