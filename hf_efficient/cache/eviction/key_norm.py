"""Key norm: keys of small length get much attention."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View


class KeyNorm(Scorer):
    """Paper: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (2406.11430)."""

    def score(self, view: View) -> torch.Tensor:
        return -view.keys.float().norm(dim=-1)
