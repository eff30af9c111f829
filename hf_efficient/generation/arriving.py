"""Copies of new tokens from the device to the host, made while the device already computes with these tokens."""

import torch

from hf_efficient.cache.bookkeeping.tensors import to_device


class ArrivingTokens:
    """The next token of each sequence. Making one waits for nothing.

    tokens: int64 [rows, 1] on the device; copied, as the next forward may overwrite them.
    """

    def __init__(self, tokens: torch.Tensor):
        self.tokens = tokens.clone()
        self._host, self._event, self._rows = self.tokens, None, range(len(tokens))
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(self.tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[list[int]]:
        """The tokens of each sequence. Waits until they are on the host, and not for what was queued after them."""
        if self._event is not None:
            self._event.synchronize()
        rows = self._host.tolist()
        return [rows[row] for row in self._rows]

    def select(self, rows: list[int]) -> None:
        """Only these sequences (indices into those so far) are left."""
        self._rows = [self._rows[row] for row in rows]
        self.tokens = self.tokens[to_device(rows, torch.int64, self.tokens.device)]


def generator_of(device: torch.device) -> torch.Generator:
    """torch's own generator of random numbers on `device`."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
