"""Distinctive: the tokens that queries are expected to look at, and those whose keys are unlike the others'."""

import torch
import torch.nn.functional as F

from hf_efficient.cache.eviction.base import View
from hf_efficient.cache.eviction.expected_attention import ExpectedAttention


class Distinctive(ExpectedAttention):
    """What is read often keeps perplexity low, but a name or a number that was said once is read only when it is asked
    for: its keys stand apart. A token is worth the better of two ranks among the n tokens of its head (1 for the
    highest, 1/n for the lowest): that of its expected attention, and `weight` times that of minus the cosine between
    its key and the mean direction of the keys, both as before the rotary embedding, whose turns make keys differ that
    mean the same. Meant for `AdaKV(Distinctive(), floor=0.5)`: the scores of a head are those cosines, dealt out in the
    order of worth, so that heads whose keys differ most, which are the ones that find things again, keep more tokens.

    Papers: Devoto et al., Expected Attention (2510.00636); Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction
    for Long-Context LLM Inference in Resource-Constrained Environments (2504.15364).

    Args:
        weight: of the ranks of the keys, from 0 (the order of Expected Attention) to 1.
        window, future: see `ExpectedAttention`.
        recent: see `Scorer`.
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
    """1 for the highest of the last axis, 1/n for the lowest of n present ones; absent ones must be -inf."""
    number = present.sum(-1, keepdim=True)
    places = scores.argsort(descending=True, stable=True).argsort()
    return (number - places) / number
