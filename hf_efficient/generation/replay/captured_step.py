"""Forwards of many requests at once over their pages, captured for a few numbers of tokens and logits, and replayed."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from transformers.utils import logging

from hf_efficient.cache.request_pages import NewTokens, RequestPages
from hf_efficient.generation.replay.captured_forward import is_being_watched
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable


logger = logging.get_logger(__name__)

# Tokens of a captured forward; others are padded to the next one. More tokens take several forwards: their results
# would not fit the processor's cache. A token of SmolLM2-135M takes 0.40 ms among 256 and 0.33 among 512 (two cores).
# Padding costs as tokens do, which bfloat16 weights multiply by 16 and int8 inputs by 4 at once.
WIDTHS = (1, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512)
# Tokens whose logits a captured forward computes, no more than its width. Up to 32 the head's weights take the time.
# Of many tokens an eighth cost little, and fewer kinds of forwards are captured.
LOGITS = (32, 64, 128, 256, 512)
# A capture costs about three forwards. Of few tokens it saves half of each later one, of many a sixth: those run
# eagerly more often before they are captured.
FEW_TOKENS, FEW_EAGER, MANY_EAGER = 64, 1, 8
REST = 4  # a kind whose capture made room for others runs eagerly that many times more often each time
MOST_BLOCKS = 4096  # of a request, for which tables have room after a warm-up: 8 MB for each group of layers


class _Captured(NamedTuple):
    version: int  # of the pages
    capture: Capture


class CapturedStep:
    """The forwards of a step of continuous batching.

    Args:
        pages: what they read.
        forward: forward(tokens, positions, index, is_captured) -> logits [rows, vocabulary] of the tokens whose numbers
            `index` int64 [rows] holds.
        is_capturable: whether forwards are captured; else each runs eagerly.
        most_bytes: of the results of all captures (`kept_bytes`); the latest stays in any case.

    Attributes:
        is_steady: whether the last call takes as long again: none of its forwards was captured, or will soon be.
        captures_many: whether forwards of more than `FEW_TOKENS` may be captured, which keeps all sequences waiting.
    """

    is_steady, captures_many = True, True

    def __init__(self, pages: RequestPages, forward: Callable, is_capturable: bool, most_bytes: int):
        self.pages, self.forward, self.is_capturable, self.most_bytes = pages, forward, is_capturable, most_bytes
        self._index = torch.zeros(LOGITS[-1], dtype=torch.int64)
        self._captures: dict[tuple[int, int], _Captured] = {}  # by (width, rows), the latest used last
        self._eager: Counter[tuple[int, int]] = Counter()  # forwards that were not replayed
        self._dropped: Counter[tuple[int, int]] = Counter()  # captures that made room for others

    def __call__(self, new: NewTokens, wanted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new tokens of requests to their pages. wanted: after how many of its last new tokens the logits are
        computed, for each request.

        Returns logits [rows, vocabulary] of those that are wanted, and their argmax int64 [rows], in tensors that the
        next call overwrites.
        """
        self.is_steady = True
        counts = [*map(len, new.tokens)]
        if sum(counts) <= self.pages.most_tokens and max(counts) <= self.pages.most_of_request:
            return self._run(new, _wanted(counts, wanted))
        parts = _parts(new, wanted, self.pages.most_tokens, self.pages.most_of_request)
        results = [[tensor.clone() for tensor in self._run(*part)] for part in parts]
        return tuple(torch.cat(tensors) for tensors in zip(*results))

    def warm_up(self, blocks: int) -> None:
        """Captures the forwards of at most `FEW_TOKENS` tokens of requests that have at most `blocks`, and
        `MOST_BLOCKS`, in each group. Nothing is written into the pages.

        Those with rings are captured as they come: each request that they know has one.
        """
        has_rings = any(group.rings is not None for group in self.pages.groups)
        if not self.is_capturable or is_being_watched() or has_rings:
            return
        self.pages.make_room(min(blocks, MOST_BLOCKS))
        nobody = NewTokens([[]], [0], [0], [[[]]] * len(self.pages.groups), [""])
        for width in (width for width in WIDTHS if width <= FEW_TOKENS):
            for rows in sorted({min(width, rows) for rows in LOGITS}):
                self.pages.fill(nobody, width)
                self._index.zero_()
                for _ in range(FEW_EAGER + 1):
                    self._forward(width, rows, True)

    def _run(self, new: NewTokens, index: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        width = WIDTHS[bisect_left(WIDTHS, new.total)]
        rows = min(width, LOGITS[bisect_left(LOGITS, max(len(index), width // 8))])
        self.pages.fill(new, width)
        self._index.numpy()[: len(index)], self._index.numpy()[len(index) : rows] = index, 0
        logits, best = self._forward(width, rows, bool(index))
        return logits[: len(index)], best[: len(index)]

    def _forward(self, width: int, rows: int, head: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Replays the forward of this kind, captures it once it has run often enough, or runs it eagerly."""
        if not self.is_capturable or is_being_watched():
            return self._compute(width, rows, False)
        kind = width, rows
        captured = self._captures.pop(kind, None)
        if captured is not None and captured.version == self.pages.version:
            self._captures[kind] = captured
            return captured.capture.replay(head)
        self._eager[kind] += 1
        is_few = width <= FEW_TOKENS
        if self._eager[kind] <= (FEW_EAGER if is_few else MANY_EAGER) or not (is_few or self.captures_many):
            self.is_steady = self.is_steady and not is_few
            return self._compute(width, rows, False)
        self.is_steady = False
        try:
            captured = _Captured(self.pages.version, Capture(lambda: self._compute(width, rows, True), self._index))
        except Exception as error:  # an error of the forward's own shows again when it runs eagerly
            if not isinstance(error, NotReplayable):
                logger.warning_once(f"forwards run eagerly, which is slower, as one could not be captured: {error}")
            self.is_capturable = False
            return self._compute(width, rows, False)
        self._captures[kind] = captured
        self._drop_oldest()
        return captured.capture.output

    def _compute(self, width: int, rows: int, is_captured: bool) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.pages
        logits = self.forward(pages.tokens[:, :width], pages.positions[:, :width], self._index[:rows], is_captured)
        return logits, logits.argmax(-1)

    def _drop_oldest(self) -> None:
        while len(self._captures) > 1 and sum(c.capture.nbytes for c in self._captures.values()) > self.most_bytes:
            dropped = next(iter(self._captures))
            del self._captures[dropped]
            self._dropped[dropped] += 1
            self._eager[dropped] = -(REST ** self._dropped[dropped])


def _wanted(counts: list[int], wanted: list[int]) -> Sequence[int]:
    """The numbers of the last `wanted` tokens of each request."""
    if len(counts) == sum(counts) == sum(wanted) and max(wanted) == 1:
        return range(len(counts))
    return [at for end, rows in zip(accumulate(counts), wanted) for at in range(end - rows, end)]


def padded(tokens: int) -> int:
    """How many tokens the forwards of `tokens` tokens compute."""
    most = WIDTHS[-1]
    whole, left = tokens // most * most, tokens % most
    return whole + (left and WIDTHS[bisect_left(WIDTHS, left)])


def _parts(new: NewTokens, wanted: list[int], most: int, most_of_request: int) -> Iterator[tuple[NewTokens, list[int]]]:
    """Cuts new tokens into forwards of at most `most` tokens, each with the numbers of the tokens whose logits are
    wanted. A prompt may be cut: its later tokens see the earlier ones in the pages."""
    part, index, count = [], [], 0
    for number, (tokens, rows) in enumerate(zip(new.tokens, wanted)):
        first = 0
        while first < len(tokens):
            taken = tokens[first : first + min(most - count, most_of_request)]
            part.append((number, taken, first))
            first, count = first + len(taken), count + len(taken)
            rows_here = min(len(taken), max(0, rows - (len(tokens) - first)))
            index += range(count - rows_here, count)
            if count == most or first < len(tokens):
                yield new.part(*zip(*part)), index
                part, index, count = [], [], 0
    if part:
        yield new.part(*zip(*part)), index
