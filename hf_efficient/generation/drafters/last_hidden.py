"""For draft heads that read one hidden state of a sequence: the one that predicted its last token."""

import torch


class LastHiddenMixin:
    """Keeps `_hidden`, float [rows, hidden_size] of the live sequences, which `begin` sets."""

    _hidden: torch.Tensor

    def accept(self, tokens: list[list[int]], hidden: torch.Tensor) -> None:
        going = torch.tensor([len(new) for new in tokens], device=hidden.device)
        latest = hidden[torch.arange(len(tokens), device=hidden.device), (going - 1).clamp(min=0)]
        self._hidden = torch.where(going[:, None] > 0, latest, self._hidden)

    def select(self, rows: list[int]) -> None:
        self._hidden = self._hidden[rows]
