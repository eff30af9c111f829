"""Layers of a `PagedCache` with a state instead of keys and values: Mamba, gated delta nets, short convolutions."""

import torch
from transformers.cache_utils import LinearAttentionLayer


REWINDABLE = 64  # states that a layer notes at most, one after each token


class RecurrentLayer(LinearAttentionLayer):
    """The states of a layer, [B, ...] each, beside the pages of others: those of its convolutions and recurrences.

    A state says nothing of earlier ones. `note` keeps a copy, so that `take_back` can return to it: speculation runs
    the layer token by token and notes the state before each.
    """

    is_compileable = False

    def __init__(self, number_of_states: int = 1):
        super().__init__(number_of_states=number_of_states)
        self._noted: list[list[torch.Tensor | None]] = []

    @property
    def holds_state(self) -> bool:
        """Whether a forward has gone through this layer."""
        return any(self.has_previous_state.values())

    def _states(self) -> list[torch.Tensor | None]:
        return [*self.conv_states.values(), *self.recurrent_states.values()]

    def _set(self, states: list[torch.Tensor | None]) -> None:
        half = self.number_of_states
        self.conv_states = dict(enumerate(states[:half]))
        self.recurrent_states = dict(enumerate(states[half:]))

    def forget_notes(self) -> None:
        self._noted.clear()

    def note(self) -> None:
        """Keeps a copy of the state, before a token is read. The oldest are dropped where there are more than
        `REWINDABLE`."""
        self._noted.append([None if state is None else state.clone() for state in self._states()])
        del self._noted[:-REWINDABLE]

    def check_take_back(self, tokens: list[int]) -> None:
        """Raises ValueError where `take_back(tokens)` is not possible."""
        if self.holds_state and max(tokens, default=0) > len(self._noted):
            raise ValueError(
                f"PagedCache cannot take back {tokens} tokens: a layer with a recurrent state noted it before each of "
                f"the last {len(self._noted)}. Run the text again, or rewind all sequences to 0"
            )

    def take_back(self, tokens: list[int]) -> None:
        """Sequence b goes back to its state before its last `tokens[b]` tokens. Then what was noted is forgotten."""
        if self.holds_state and any(tokens):
            now, counts = self._states(), sorted(set(tokens))
            rows, place = torch.arange(len(tokens)), torch.tensor([counts.index(count) for count in tokens])
            for index, state in enumerate(now):
                if state is not None:
                    past = torch.stack([self._noted[-count][index] if count else state for count in counts])
                    now[index] = past[place.to(state.device), rows.to(state.device)]
            self._set(now)
            self.forget_notes()

    def select(self, indices: torch.Tensor) -> None:
        """Sequence i becomes what sequence `indices[i]` was (int64)."""
        for states in (self._noted, [current := self._states()]):
            for each in states:
                each[:] = [None if state is None else state[indices.to(state.device)] for state in each]
        self._set(current)

    def forget(self) -> None:
        """Drops the tensors."""
        RecurrentLayer.__init__(self, self.number_of_states)
