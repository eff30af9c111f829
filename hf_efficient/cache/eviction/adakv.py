"""AdaKV: one budget for all heads of a layer, spent where the scores are high."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View
from hf_efficient.cache.eviction.tova import TOVA


class AdaKV(Scorer):
    """Lets the heads of a layer compete for the budget, by the scores of another scorer.

    The scores must be comparable between heads. Attention is. Positions are not, nor are the scores of `TOVA`, whose
    heads keep the same tokens.

    Paper: Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation
    (https://arxiv.org/abs/2407.11550).

    Args:
        scorer: says which tokens matter.
        floor: share of the budget that every head has for itself, from 0 to 1.
    """

    def __init__(self, scorer: Scorer, floor: float = 0.2):
        if not isinstance(scorer, Scorer) or isinstance(scorer, TOVA) or scorer.reindexes:
            raise ValueError(f"scorer={scorer!r}: must be a Scorer that may keep different tokens in every head")
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1:
            raise ValueError(f"floor={floor!r}: must be a share from 0 to 1")
        self.scorer, self.floor = scorer, floor
        for name in ("sinks", "recent", "window", "accumulates", "needs_rotary"):
            setattr(self, name, getattr(scorer, name))

    def score(self, view: View) -> torch.Tensor:
        return self.scorer.score(view)

    def accumulate(self, view: View) -> torch.Tensor:
        return self.scorer.accumulate(view)

    def recent_tokens(self, budget: int) -> int:
        return self.scorer.recent_tokens(budget)

    def counts(self, scores: torch.Tensor, budgets: list[int]) -> list[list[int]]:
        heads = scores.shape[1]
        result = []
        for sequence, budget in zip(scores, budgets):
            own = sequence.topk(min(int(self.floor * budget), sequence.shape[1])).indices
            first = sequence.scatter(1, own, float("inf")).masked_fill(sequence == float("-inf"), float("-inf"))
            chosen = first.flatten().topk(min(heads * budget, first.numel())).indices
            result.append(torch.bincount(chosen // sequence.shape[1], minlength=heads).tolist())
        return result
