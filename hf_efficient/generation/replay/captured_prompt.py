"""Prompts on a CPU, sequence by sequence in chunks whose forwards are captured and replayed."""

from collections import Counter
from collections.abc import Callable

import torch
from transformers.utils import logging

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable


logger = logging.get_logger(__name__)

CHUNK = 128  # tokens of a forward: its activations stay in the second-level cache, and more cost as much each
STEP = 16  # widths of chunks are multiples of it
LEAST_TOKENS = 64  # of a prompt, on average, for those of a batch to run one by one


class CapturedPrompt:
    """Forwards of a model over one sequence of `cache`, whose pool has a fixed size, for prompts of any length.

    A width runs eagerly when it is first met, since a capture costs about three forwards.

    Attributes:
        forward: forward(tokens, positions, last) -> logits [1, 1, vocabulary] after the token number `last`, int64 [1].
    """

    forward: Callable | None = None

    def __init__(self, cache: PagedCache, most_bytes: int):
        """most_bytes: of the results of all captures over the cache; the latest stays in any case."""
        self.cache, self.most_bytes = cache, most_bytes
        self._seen: Counter[int] = Counter()  # width -> batches with such a chunk
        self._captures: dict[int, tuple[tuple, list[int], Capture]] = {}  # width -> inputs, addresses, capture
        self._falls_back = False  # to eager forwards, for good

    def takes(self, lengths: list[int]) -> bool:
        """Whether prompts of so many tokens, of one batch, are replayed, or captured now."""
        widths = {width for length in lengths for width in _widths(length)}
        self._seen.update(widths)
        worth = len(lengths) == 1 or sum(lengths) >= LEAST_TOKENS * len(lengths)
        return worth and not self._falls_back and all(self._seen[width] > 1 for width in widths)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Appends tokens int64 [1, n] to the only sequence of the cache, which is empty. positions: int64 [1, n].

        Returns the logits [1, vocabulary] that follow, in a tensor that the next call overwrites; None, with nothing
        appended, where the caller has to run the forward eagerly.
        """
        logits, first = None, 0
        for width in _widths(tokens.shape[1]):
            chunk = slice(first, first + width)
            logits = None if self._falls_back else self._run(tokens[:, chunk], positions[:, chunk], width)
            if logits is None:
                self.cache.rewind([0])
                return None
            first += width
        return logits[:, -1]

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor | None:
        count = tokens.shape[1]
        new = tokens, positions, torch.tensor([count - 1])
        inputs, addresses, capture = self._captures.pop(width, (None, None, None))
        if inputs is None:
            inputs = tuple(tensor.new_zeros(1, width) for tensor in new[:2]) + (new[2].clone(),)
        for static, values in zip(inputs[:2], new):
            static[:, :count], static[:, count:] = values, values[:, -1:]
        inputs[2].copy_(new[2])
        with self.cache.decode_step(width):
            now = [tensor.data_ptr() for tensor in self.cache.static_tensors()]
            if capture is not None and addresses == now:
                logits = capture.replay()
            else:
                capture = self._capture(inputs)
                if capture is None:
                    return None
                logits = capture.output
        self._captures[width] = inputs, now, capture
        while len(self._captures) > 1 and sum(c.nbytes for *_, c in self._captures.values()) > self.most_bytes:
            del self._captures[next(iter(self._captures))]
        if count < width:
            self.cache.rewind([length - (width - count) for length in self.cache.cache_seqlens])
        return logits

    def _capture(self, inputs: tuple) -> Capture | None:
        try:
            return Capture(lambda: self.forward(*inputs))
        except Exception as error:  # an error of the forward's own shows again when it runs eagerly
            if not isinstance(error, NotReplayable):
                logger.warning_once(f"prompts run eagerly, which is slower, as one could not be captured: {error}")
            self._falls_back = True
            return None


def _widths(length: int) -> list[int]:
    """Of the chunks of a prompt, the last with its padding."""
    rest = -(-(length % CHUNK) // STEP) * STEP
    return [CHUNK] * (length // CHUNK) + [rest] * bool(rest)
