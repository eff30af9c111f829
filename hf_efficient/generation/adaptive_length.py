"""How many tokens to draft, so that speculation pays: from what was accepted and from measured seconds."""

import weakref
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import accumulate

from hf_efficient.generation.drafters.base import Proposal


DECAY, FADE = 0.9, 0.97  # weight of what is known of a row's acceptance after a step with a draft, and without one
GUESS, PRIOR = 0.7, 2.0  # the acceptance at first, and the tokens it counts for
CHEAP = 0.03  # of a forward: a draft that costs less is made in every step,
LOOK, MANY = (
    4,
    4,
)  # but in every fourth one while drafts do not pay in a batch of so many rows, which seldom pay at once
# Of the seconds of a plain forward of a batch: what its slowest row takes anyway. Rows that are ahead should not draft more than
# they are sure of, as they will end before it.
SUNK = 0.3
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024  # plain steps between two trials of a drafter that does not pay, over runs
# Recordings have to pay in what is left of the call, but for the first ones of a model, and for those that take no more than
# this share of the seconds of all its forwards: they pay in later calls.
FREE_RECORDINGS, INVESTED = 3, 0.03


class Seconds:
    """Measured times by size: the lower quartile of the last few of each size (what else the machine does only adds) and no more
    than that of any larger size, lines between sizes, and beyond the largest size no more than there, so that larger ones are
    tried.

    Attributes:
        free, credit: so many recordings, and seconds of them, need not pay in the same call.
        rests: draft -> rows -> pause between its trials, and steps of it that are left, when its last run ended."""

    def __init__(self):
        self.free, self.credit = FREE_RECORDINGS, 0.0
        self.rests = weakref.WeakKeyDictionary()
        self._measured: dict[int, deque] = defaultdict(lambda: deque(maxlen=7))
        self._sizes: list[int] = []
        self._least: list[float] = []  # of each of `_sizes`

    def add(self, size: int, seconds: float) -> None:
        if size not in self._measured:
            insort(self._sizes, size)
        self._measured[size].append(seconds)
        quartiles = [sorted(self._measured[each])[(len(self._measured[each]) - 1) // 4] for each in self._sizes]
        self._least = list(accumulate(reversed(quartiles), min))[::-1]

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


_forward_seconds: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> Seconds by rows * columns


class AdaptiveLength:
    """Chooses, step by step, how deep to draft and how much of a proposal to verify: what gives most tokens a second.

    The seconds of a forward by its number of tokens are kept with the model, over runs. Where a row's next token is drawn
    from what a drawn draft leaves over, the draft's length changes which numbers are drawn, so it must not depend on a
    clock: then `timed=False`, and every forward counts as one, a drafted token as `draft_cost` of one.

    Args:
        model: the target.
        rows: in the batch.
        depth: the deepest draft.
        draft_cost: seconds of drafting one token by those of a forward, where nothing is measured.
        padded: how many columns a forward of so many rows and columns computes.
        recording: seconds that the next forward of so many rows and columns takes to be recorded.
        draft: what drafts: where it did not pay in its last run of as many rows, it goes on resting.
    """

    def __init__(
        self,
        model,
        rows: int,
        depth: int,
        timed: bool = True,
        draft_cost: float = 0.0,
        padded: Callable[[int, int], int] = lambda rows, columns: columns,
        recording: Callable[[int, int], float] = lambda rows, columns: 0.0,
        draft=None,
    ):
        self.depth, self.timed, self.draft_cost = depth, timed, draft_cost
        self.padded, self.recording = padded, recording
        self.growing, self.left = rows, 1  # rows that have not ended, tokens that the longest may still get
        self.forward = _forward_seconds.setdefault(model, Seconds()) if timed else Seconds()
        self.drafting = Seconds()
        self.kept, self.tried = [0.0] * rows, [0.0] * rows  # of the drafts that had only right ones before them
        self.calibration = 1.0  # accepted tokens by those that the drafter's confidence promised
        self.tells_itself = False  # whether the drafter says how sure it is
        rests = {} if draft is None or not timed else self.forward.rests.setdefault(draft, {})
        self.pause, self.waiting = rests.get(rows, (0, 0))
        self.rests, self.rows = rests, rows
        self.usual, self.promise = 0.0, 0.0  # tokens that drafts promise a step: lately, and in this step

    def choose(self, limits: list[int]) -> int:
        """How deep to draft now, 0 for a plain step."""
        rows, deepest = len(limits), min(self.depth, max(limits))
        self.growing, self.left = max(1, sum(limit > 0 for limit in limits)), max(limits) + 1
        self.promise = 0.0
        if deepest == 0 or (self.timed and not self.forward.largest):
            return 0  # the first step shows what a plain one costs
        if self.tells_itself and self.drafting.at(deepest) < CHEAP * self.forward.at(rows):
            if rows < MANY or self.waiting == 0 or self.waiting % LOOK == 1:  # 1: the step of a trial
                return deepest  # and `cut` decides
            self.waiting -= 1
            return 0
        deepest = min(deepest, self.widest(rows))
        all_rows = (sum(self.kept) + GUESS * PRIOR) / (sum(self.tried) + PRIOR)
        gains = [0.0] * deepest
        for kept, tried, limit in zip(self.kept, self.tried, limits):
            acceptance, reached = (kept + all_rows * PRIOR) / (tried + PRIOR), 1.0
            for depth in range(min(deepest, limit)):
                reached *= acceptance
                gains[depth] += reached
        return self._best(rows, gains, drafts=True)

    def cut(self, proposal: Proposal) -> Proposal | None:
        """As much of the proposal as pays; None for a plain step."""
        # cutting drawn tokens by how sure the drafter is of them would change what is drawn
        self.tells_itself = proposal.confidence is not None and proposal.probabilities is None
        if not self.tells_itself:
            return proposal
        rows = len(proposal.counts)
        gains = [gain * self.calibration for gain in _promised(proposal)[: self.widest(rows)]]
        width = self._best(rows, gains, drafts=False)
        return proposal.cut(width) if width else None

    def learn(
        self,
        proposal: Proposal | None,
        accepted: list[int],
        depths: list[int],
        draft_seconds: float,
        verify_seconds: float,
        settled: bool = True,
    ) -> None:
        """After a step: accepted and depths (of the deepest draft) of each row; seconds of `propose`, and of the rest; whether
        those are what such steps will take from now on."""
        width = 0 if proposal is None else proposal.width
        if self.timed:
            tokens = self._tokens(len(accepted), width)
            self.forward.credit += INVESTED * verify_seconds
            if settled:
                self.forward.add(tokens, verify_seconds)
            elif width and self.forward.free:
                self.forward.free -= 1
            elif width:
                self.forward.credit -= max(0.0, verify_seconds - self.forward.at(tokens))
            if width:
                self.drafting.add(max(depths), draft_seconds)
        for row, (hits, depth) in enumerate(zip(accepted, depths)):
            weight = DECAY if depth else FADE
            self.kept[row] = weight * self.kept[row] + hits
            self.tried[row] = weight * self.tried[row] + min(hits + 1, depth)
        self.usual = DECAY * self.usual + (1 - DECAY) * self.promise
        if self.tells_itself and width:
            promised = sum(_promised(proposal))
            ratio = min((sum(accepted) + 0.5) / (promised + 0.5), 2.0)
            self.calibration = DECAY * self.calibration + (1 - DECAY) * ratio

    def end(self) -> None:
        """After the last step."""
        self.rests[self.rows] = self.pause, self.waiting

    def select(self, rows: list[int]) -> None:
        self.kept, self.tried = [self.kept[row] for row in rows], [self.tried[row] for row in rows]

    def widest(self, rows: int) -> int:
        """So many drafts a row are tried at most: with the token before them twice the columns that have been measured."""
        return max(4, 2 * (self.forward.largest // rows)) - 1 if self.timed else self.depth

    def _best(self, rows: int, gains: list[float], drafts: bool) -> int:
        """The number of tokens that gives most tokens a second. gains: what each of them adds to the tokens of the step.
        drafts: drafting them is still to be paid."""
        self.promise = sum(gains)
        plain = self._seconds(rows, 0, 0.0, drafts)
        sunk = SUNK * (1 - 1 / self.growing) * plain
        best, total, best_rate = 0, 0.0, self.growing / (plain - sunk)
        for width, gain in enumerate(gains, 1):
            total += gain
            if not drafts and width < len(gains) and self.padded(rows, width + 1) > width + 1:
                continue  # the forward computes the next one anyway
            rate = (self.growing + total) / (self._seconds(rows, width, total, drafts) - sunk)
            if rate > best_rate:
                best, best_rate = width, rate
        if best:
            self.pause = self.waiting = 0
        elif self.waiting == 0:
            self.pause = self.waiting = min(max(FIRST_PAUSE, 2 * self.pause), LONGEST_PAUSE)
        else:
            self.waiting -= 1
            best = int(self.waiting == 0 and not self._to_be_paid(rows, 1))  # a trial
        return best

    def _tokens(self, rows: int, width: int) -> int:
        """What a forward of `width` drafts a row computes."""
        return rows * self.padded(rows, width + 1)

    def _to_be_paid(self, rows: int, width: int) -> float:
        """Seconds of recording a forward of `width` drafts a row that what is left of this call has to win."""
        seconds = self.recording(rows, width + 1) if self.timed else 0.0
        return 0.0 if self.forward.free or seconds <= self.forward.credit else seconds

    def _seconds(self, rows: int, width: int, gain: float, drafts: bool) -> float:
        """Of a step that verifies `width` drafts a row, `gain` of which are right in all rows together."""
        if not self.timed:
            return 1.0 + self.draft_cost * width
        steps = self.left * self.growing / (self.growing + gain)
        if gain:  # as many as promise so much
            steps = max(1.0, steps * min(1.0, self.usual / self.promise))
        drafting = self.drafting.at(width) if drafts and width else 0.0
        return self.forward.at(self._tokens(rows, width)) + drafting + self._to_be_paid(rows, width) / steps


def _promised(proposal: Proposal) -> list[float]:
    """The tokens of all rows that each place of the proposal adds, by the drafter's confidence."""
    promised = [0.0] * proposal.width  # in Python: of so few numbers operators take longer
    for confidence, count in zip(proposal.confidence.tolist(), proposal.counts.tolist()):
        for place in range(count):
            promised[place] += confidence[place]
    return promised
