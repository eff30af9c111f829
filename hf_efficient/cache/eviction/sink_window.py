"""StreamingLLM: keeps the first tokens and the last ones, which the model sees as one text without a gap."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View, check_positive


class SinkWindow(Scorer):
    """Scores a token by its position, and moves the keys of the sinks to just before the window.

    So a text may become longer than the texts that the model was trained on.

    Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks (https://arxiv.org/abs/2309.17453).

    Args:
        sinks: first tokens that stay.
    """

    needs_rotary = reindexes = True

    def __init__(self, sinks: int = 4):
        check_positive(sinks=sinks)
        super().__init__(recent=1)
        self.sinks = sinks

    def score(self, view: View) -> torch.Tensor:
        return view.key_positions

    def recent_tokens(self, budget: int) -> int:
        return budget - self.sinks
