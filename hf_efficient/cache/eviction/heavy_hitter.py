"""H2O: the attention that all queries have paid, and half of the budget for the last tokens."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View


class HeavyHitter(Scorer):
    """Scores a token by the sum of the attention that it has received from all queries.

    Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference (https://arxiv.org/abs/2306.14048).

    Args:
        recent: last tokens that always stay; half of the budget where that is more.
    """

    accumulates = True

    def accumulate(self, view: View) -> torch.Tensor:
        return view.attention().sum((2, 3))

    def score(self, view: View) -> torch.Tensor:
        return view.accumulated

    def recent_tokens(self, budget: int) -> int:
        return max(self.recent, budget // 2)
