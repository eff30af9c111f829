"""Measured times, and what is known from run to run of how long a model and its drafters take."""

import weakref
from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import accumulate


# Recordings have to pay in what is left of a call, but for so many first ones of a model.
FREE_RECORDINGS = 3
GUESS = 0.7  # the acceptance of a drafter that nothing is known of


class LatencyCurve:
    """Measured times by size: the lower quartile of the last few of each size (what else the machine does only adds) and no more
    than that of any larger size, lines between sizes, and beyond the largest size no more than there, so that larger ones are
    tried."""

    def __init__(self):
        self._measured: dict[int, deque] = defaultdict(lambda: deque(maxlen=7))
        self._sizes: list[int] = []
        self._quartiles: dict[int, float] = {}
        self._least: list[float] = []  # of each of `_sizes`

    def add(self, size: int, seconds: float) -> None:
        measured = self._measured[size]
        if not measured:
            insort(self._sizes, size)
        measured.append(seconds)
        quartile = sorted(measured)[(len(measured) - 1) // 4]
        if self._quartiles.get(size) != quartile:
            self._quartiles[size] = quartile
            quartiles = [self._quartiles[each] for each in reversed(self._sizes)]
            self._least = list(accumulate(quartiles, min))[::-1]

    @property
    def largest(self) -> int:
        """The largest size measured, 0 for none."""
        return self._sizes[-1] if self._sizes else 0

    def at(self, size: int) -> float:
        """0.0 while nothing is known."""
        if not self._sizes:
            return 0.0
        after = bisect_left(self._sizes, size)
        if after == len(self._sizes) or after == 0 or self._sizes[after] == size:
            return self._least[min(after, len(self._sizes) - 1)]
        low, high = self._sizes[after - 1], self._sizes[after]
        share = (size - low) / (high - low)
        return self._least[after - 1] + share * (self._least[after] - self._least[after - 1])


@dataclass
class DrafterStatistics:
    """Of a drafter on so many rows of a model.

    drafting: seconds of a proposal by its depth; starting: of reading the prompts, 0.0 while unknown.
    acceptance: how probable it is that a guess is right where those before it are.
    tells_itself: it says how sure it is.
    pause, waiting: plain steps between two trials, 0 while it pays, and those that are left.
    """

    drafting: LatencyCurve = field(default_factory=LatencyCurve)
    starting: float = 0.0
    acceptance: float = GUESS
    tells_itself: bool = False
    pause: int = 0
    waiting: int = 0


@dataclass
class ModelLatency:
    """forward: seconds of a forward by rows * columns. free, credit: so many recordings, and seconds of them, need not pay in
    the same call. drafters: draft -> rows -> what is known of it."""

    forward: LatencyCurve = field(default_factory=LatencyCurve)
    free: int = FREE_RECORDINGS
    credit: float = 0.0
    drafters: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)


_models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> ModelLatency


def latency_of(model) -> ModelLatency:
    """The same one as long as `model` lives."""
    return _models.setdefault(model, ModelLatency())
