"""Key norm: keeps the tokens whose keys have the smallest norm."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View


class KeyNorm(Scorer):
    """Scores a token by minus the L2 norm of its key: keys of small norm get much attention.

    Paper: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (https://arxiv.org/abs/2406.11430).

    Args:
        recent: last tokens that always stay.
    """

    def score(self, view: View) -> torch.Tensor:
        return -view.keys.float().norm(dim=-1)
