"""A drafter that only listens."""

import torch

from hf_efficient.generation.drafters.base import Drafter


class Recorder(Drafter):
    """Guesses nothing and keeps the hidden states that it is shown.

    states: of each batch row whose answer has more than one token, what predicted its tokens from the second column of the
        prompt on, [columns, hidden size * (1 + layers)] each, in order.
    """

    reads_hidden = True
    max_tokens = 1

    def __init__(self, layers: tuple[int, ...] = ()):
        self.reads_layers = layers
        self.states: dict[int, list[torch.Tensor]] = {}

    def begin(self, sequences, hidden=None) -> None:
        self._sequences = sequences
        self.states = {b: [prompt] for b, prompt in zip(sequences.live, hidden) if sequences.unfinished(b)}

    def propose(self, limits, nodes):
        return None

    def accept(self, tokens, hidden=None) -> None:
        for b, new, states in zip(self._sequences.live, tokens, hidden):
            if b in self.states:
                self.states[b].append(states[: len(new)])

    def select(self, rows) -> None:
        pass
