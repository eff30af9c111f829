"""Distinctive: keeps what later queries are expected to read, and tokens whose keys are unlike the others."""

import torch
import torch.nn.functional as F

from hf_efficient.cache.eviction.base import View
from hf_efficient.cache.eviction.expected_attention import ExpectedAttention


class Distinctive(ExpectedAttention):
    """Ranks tokens by their expected attention or by how much their key differs from the others, whichever rank is
    better.

    Tokens that are read often keep perplexity low. A name or a number is read only when it is asked for, but its key
    differs from the others. Among the n tokens of a head ranks go from 1 (highest) to 1/n. The first rank is that of
    Expected Attention. The second, times `weight`, is by descending difference: minus the cosine between a key and the
    mean direction of the keys, without the rotary embedding. Sorted by the better rank, the tokens of a head get its
    differences in descending order as scores. So under `AdaKV(Distinctive(), floor=0.5)` the heads whose keys differ
    most keep more tokens.

    Papers: Devoto et al., Expected Attention (https://arxiv.org/abs/2510.00636); Park et al., KeyDiff: Key
    Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments
    (https://arxiv.org/abs/2504.15364).

    Args:
        weight: of the second rank, from 0 (the order of Expected Attention) to 1.
        window, future: see `ExpectedAttention`.
        recent: last tokens that always stay.
    """

    def __init__(self, weight: float = 0.7, window: int = 512, future: int = 512, recent: int = 64):
        super().__init__(window, future, recent)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
            raise ValueError(f"weight={weight!r}: must be a number from 0 to 1")
        self.weight = weight

    def score(self, view: View) -> torch.Tensor:
        absent = ~view.present
        keys = view.rotate(view.keys, -view.key_positions)
        keys = F.normalize(keys, dim=-1).masked_fill(absent[..., None], 0)
        similarity = F.cosine_similarity(keys, keys.sum(2, keepdim=True), dim=-1)
        difference = (-similarity).masked_fill(absent, float("-inf"))
        attention = super().score(view).masked_fill(absent, float("-inf"))
        worth = torch.maximum(_ranks(attention, view.present), self.weight * _ranks(difference, view.present))
        order = worth.masked_fill(absent, float("-inf")).argsort(descending=True, stable=True)
        return difference.scatter(-1, order, difference.sort(descending=True).values)


def _ranks(scores: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Scores [..., n] to ranks of the last axis, from 1 for the highest to 1/m for the lowest of m present ones; absent
    ones must be -inf."""
    number = present.sum(-1, keepdim=True)
    order = scores.argsort(descending=True, stable=True).argsort()
    return (number - order) / number
