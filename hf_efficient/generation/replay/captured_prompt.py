"""Prompts in chunks whose forwards are captured and replayed: sequence by sequence, those of one length at once."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from transformers.utils import logging

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.kernels.replay.cuda_graph import on_device
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable


logger = logging.get_logger(__name__)

# Tokens of a forward, as many of the first as there are: weights are read once for all of them. Half of the first where
# activations would take more than the budget.
CHUNKS = (512, 128)
STEP = 16  # widths of chunks are multiples of it
COARSE_STEP = 64  # on a device, of prompts longer than the smaller chunk
LEAST_TOKENS = 64  # of a prompt, on average, for those of a batch to be captured
MOST_ON_DEVICE = 512  # tokens of all prompts of a batch: a GPU computes more for longer than the host queues kernels
REST = 4  # a shape whose capture was dropped is captured again after so many meetings more each time


class CapturedPrompt:
    """Forwards of a model over sequences of `cache`, whose pool has a fixed size, for prompts of any length.

    A shape runs eagerly when it is first met, since a capture costs about three forwards, and a while longer each time
    its capture had to make room for others.

    Attributes:
        chunks: tokens of a forward, as `CHUNKS`.
        forward: forward(tokens, positions, last) -> logits [rows, 1, vocabulary] after token number `last`, int64 [1].
        new_capture: captures a forward of so many tokens; the third argument is the input that only the head reads.
    """

    forward: Callable | None = None
    new_capture: Callable[[Callable, int, torch.Tensor], Capture] | None = None

    def __init__(self, cache: PagedCache, most_bytes: int, is_of_cpu: bool, most_tokens: int):
        """most_bytes: of the results of all captures over the cache; the latest stays in any case. most_tokens: of a
        forward on a CPU (`tokens_within_budget`)."""
        self.cache, self.most_bytes = cache, most_bytes
        self.chunks = max(CHUNKS[1], min(CHUNKS[0], 1 << most_tokens.bit_length() - 1)), CHUNKS[1]
        self._widths = partial(_widths, self.chunks) if is_of_cpu else _device_widths
        self._seen: Counter[tuple[int, int]] = Counter()  # rows and width -> batches with such a chunk
        # rows and width -> inputs, addresses, capture
        self._captures: dict[tuple[int, int], tuple[tuple, list[int], Capture]] = {}
        self._dropped: Counter[tuple[int, int]] = Counter()  # rows and width -> captures that made room for others
        self._falls_back = False  # to eager forwards, for good

    def takes(self, lengths: list[int]) -> bool:
        """Whether prompts of so many tokens, of one batch, are replayed, or captured now."""
        shapes = {
            (len(rows), width) for rows in together(lengths, self.chunks[0]) for width in self._widths(lengths[rows[0]])
        }
        self._seen.update(shapes)
        worth = len(lengths) == 1 or sum(lengths) >= LEAST_TOKENS * len(lengths)
        return worth and not self._falls_back and all(self._seen[shape] > 1 for shape in shapes)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Appends tokens int64 [rows, n] to the sequences of the cache, which are empty. positions: int64 [rows, n].

        Returns the logits [rows, vocabulary] that follow, in a tensor that the next call overwrites; None, with nothing
        appended, where the caller has to run the forward eagerly.
        """
        with on_device(tokens.device):  # graphs are captured and replayed on streams of the current device
            return self._read(tokens, positions)

    def _read(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        logits, first = None, 0
        for width in self._widths(tokens.shape[1]):
            chunk = slice(first, first + width)
            is_last = first + width >= tokens.shape[1]
            logits = None if self._falls_back else self._run(tokens[:, chunk], positions[:, chunk], width, is_last)
            if logits is None:
                self.cache.rewind([0] * len(tokens))
                return None
            first += width
        return logits[:, -1]

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, width: int, is_last: bool) -> torch.Tensor | None:
        """Appends a chunk, and returns the logits that follow, which mean nothing unless `is_last`."""
        (rows, count), shape = tokens.shape, (len(tokens), width)
        inputs, addresses, capture = self._captures.pop(shape, (None, None, None))
        if inputs is None:
            inputs = tokens.new_zeros(rows, width), positions.new_zeros(rows, width), tokens.new_zeros(1)
        for static, values in zip(inputs, (tokens, positions)):
            static[:, :count], static[:, count:] = values, values[:, -1:]
        inputs[2].fill_(count - 1)
        with self.cache.decode_step(width):
            now = [tensor.data_ptr() for tensor in self.cache.static_tensors()]
            if capture is not None and addresses == now:
                logits = capture.replay() if is_last else capture.replay(head=False)
            else:
                capture = self._capture(inputs)
                if capture is None:
                    return None
                logits = capture.output
        self._captures[shape] = inputs, now, capture
        while len(self._captures) > 1 and sum(c.nbytes for *_, c in self._captures.values()) > self.most_bytes:
            dropped = next(iter(self._captures))
            del self._captures[dropped]
            self._dropped[dropped] += 1
            self._seen[dropped] = 1 - REST ** self._dropped[dropped]
        if count < width:
            self.cache.rewind([length - (width - count) for length in self.cache.cache_seqlens])
        return logits

    def _capture(self, inputs: tuple) -> Capture | None:
        try:
            return self.new_capture(lambda: self.forward(*inputs), inputs[0].numel(), inputs[2])
        except Exception as error:  # an error of the forward's own shows again when it runs eagerly
            if not isinstance(error, NotReplayable):
                logger.warning_once(f"prompts run eagerly, which is slower, as one could not be captured: {error}")
            self._falls_back = True
            return None


def together(lengths: list[int], most: int) -> list[range]:
    """The rows of a batch with prompts of these lengths that run at once: neighbours of one length, of at most `most`
    tokens."""
    groups: list[range] = []
    for row, length in enumerate(lengths):
        last = groups[-1] if groups else range(0)
        if last and lengths[last[0]] == length and (len(last) + 1) * length <= most:
            groups[-1] = range(last.start, row + 1)
        else:
            groups.append(range(row, row + 1))
    return groups


def _widths(chunks: tuple[int, int], length: int) -> list[int]:
    """Of the chunks of a prompt, the last with its padding."""
    widths = []
    for chunk in chunks:
        widths += [chunk] * (length // chunk)
        length %= chunk
    return widths + [-(-length // STEP) * STEP] * bool(length)


def _device_widths(length: int) -> list[int]:
    """As `_widths`, of one chunk: a device computes many tokens at once."""
    step = STEP if length <= CHUNKS[1] else COARSE_STEP
    return [-(-length // step) * step]
