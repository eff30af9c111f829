"""Token trees: several continuations of a row in one forward, sharing their beginnings."""

import numpy as np
import torch


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """parents: int64 [rows, width], -1 for those that follow the root, and a parent stands before its children.

    Returns bool [rows, width + 1, width + 1] over the root and the nodes: whether each descends from the other, itself
    included. Row i is what node i sees, and its sum is one more than the node's depth."""
    above = parents.cpu().numpy() + 1  # bits by numpy: of so few numbers torch's operators take longer
    seen, row = np.ones((above.shape[0], above.shape[1] + 1), np.uint64), np.arange(len(above))
    for node in range(1, seen.shape[1]):
        seen[:, node] = seen[row, above[:, node - 1]] | np.uint64(1 << node)
    bits = torch.from_numpy(seen.view(np.int64)).to(parents.device)
    return (bits[..., None] >> torch.arange(bits.shape[1], device=bits.device)) & 1 > 0
