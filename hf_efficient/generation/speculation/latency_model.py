"""Measured seconds of a model's forwards and of its drafters, and how often the drafts are accepted."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import accumulate


FREE_CAPTURES = 3  # the first captures of a model need not pay within one call: later calls replay them
CREDIT = 4.0  # plain steps that a drafter may lose before it rests until they are saved again
PRIOR_ACCEPTANCE = 0.7  # the acceptance rate that a new drafter starts from
_WINDOW = 7  # latest measurements of a size that count


class LatencyCurve:
    """Seconds by size (tokens of a forward, or depth of a draft), from measurements.

    The value at a measured size is the lower quartile of its last 7 measurements, as other work on the machine only
    adds time, and at most the value of any larger size. Between two sizes it is linear. Beyond the largest size it is
    constant: an optimistic guess, so that larger sizes are tried. A single measurement may be of a disturbed
    moment: it counts at most as many times the value of the size before as it is larger, so that it is tried again.
    """

    def __init__(self):
        self._measured: dict[int, deque] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._sizes: list[int] = []
        self._quartiles: dict[int, float] = {}
        self._values: list[float] = []  # one for each of `_sizes`

    def add(self, size: int, seconds: float) -> None:
        measured = self._measured[size]
        if not measured:
            insort(self._sizes, size)
        measured.append(seconds)
        quartile = sorted(measured)[(len(measured) - 1) // 4]
        if self._quartiles.get(size) != quartile or len(measured) == 2:
            self._quartiles[size] = quartile
            found = []
            for before, each in zip([None, *self._sizes], self._sizes):
                is_alone = before is not None and len(self._measured[each]) == 1
                most = found[-1] * each / before if is_alone else float("inf")
                found.append(min(self._quartiles[each], most))
            self._values = list(accumulate(reversed(found), min))[::-1]

    @property
    def largest(self) -> int:
        """The largest size measured, 0 for none."""
        return self._sizes[-1] if self._sizes else 0

    def at(self, size: int) -> float:
        """Seconds at `size`; 0.0 before the first measurement."""
        if not self._sizes:
            return 0.0
        after = bisect_left(self._sizes, size)
        if after == len(self._sizes) or after == 0 or self._sizes[after] == size:
            return self._values[min(after, len(self._sizes) - 1)]
        low, high = self._sizes[after - 1], self._sizes[after]
        share = (size - low) / (high - low)
        return self._values[after - 1] + share * (self._values[after] - self._values[after - 1])


@dataclass
class AcceptanceStatistics:
    """How a drafter does on batches of one size of one model.

    draft_seconds: of a proposal, by its depth.
    prompt_seconds: of reading the prompts before the first proposal of a call; 0.0 before the first measurement.
    acceptance: probability that a drafted token is accepted, given that all before it are.
    has_confidence: its proposals come with `Proposal.confidence`.
    pause_steps: plain steps between two trials of a drafter that does not pay; 0 while it pays.
    steps_to_trial: those of them that are left.
    balance: plain steps that drafts have saved, less those that they have cost, and a small share of all steps; at most
        `CREDIT`, so that old gains do not pay for new losses.
    """

    draft_seconds: LatencyCurve = field(default_factory=LatencyCurve)
    prompt_seconds: float = 0.0
    acceptance: float = PRIOR_ACCEPTANCE
    has_confidence: bool = False
    pause_steps: int = 0
    steps_to_trial: int = 0
    balance: float = CREDIT


@dataclass
class LatencyModel:
    """How long the forwards of a model take.

    forward_seconds: of a forward, by the tokens that it computes, its padding included.
    free_captures: so many captures still need not pay within one call.
    capture_budget: seconds that further captures may take without paying within one call.
    """

    forward_seconds: LatencyCurve = field(default_factory=LatencyCurve)
    free_captures: int = FREE_CAPTURES
    capture_budget: float = 0.0
