"""How many tokens to draft, so that speculation pays: from what was accepted and from measured seconds."""

import weakref
from bisect import bisect_left, insort
from collections import defaultdict, deque
from statistics import median

import torch

from hf_efficient.generation.drafters.base import Proposal


DECAY = 0.9  # weight of what is known of a row's acceptance when the next step is added
PRIOR = 4.0  # steps that the first guess of the acceptance counts for
CHEAP = 0.03  # of a forward: a draft that costs less is made in every step
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # plain steps between two trials of a drafter that does not pay


class Seconds:
    """Measured times by size: the median of the last few of each size, lines between sizes, and no more than at the largest
    size beyond it, so that larger ones are tried."""

    def __init__(self):
        self._measured: dict[int, deque] = defaultdict(lambda: deque(maxlen=7))
        self._sizes: list[int] = []
        self._medians: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        if size not in self._measured:
            insort(self._sizes, size)
        self._measured[size].append(seconds)
        self._medians[size] = median(self._measured[size])

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def at(self, size: int) -> float:
        """0.0 while nothing is known."""
        if not self._sizes:
            return 0.0
        if size in self._medians:
            return self._medians[size]
        after = bisect_left(self._sizes, size)
        if after in (0, len(self._sizes)):
            return self._medians[self._sizes[min(after, len(self._sizes) - 1)]]
        low, high = self._sizes[after - 1], self._sizes[after]
        share = (size - low) / (high - low)
        return self._medians[low] + share * (self._medians[high] - self._medians[low])


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
    """

    def __init__(self, model, rows: int, depth: int, timed: bool = True, draft_cost: float = 0.0):
        self.depth, self.timed, self.draft_cost = depth, timed, draft_cost
        self.forward = _forward_seconds.setdefault(model, Seconds()) if timed else Seconds()
        self.drafting = Seconds()
        self.kept, self.tried = [0.75 * PRIOR] * rows, [PRIOR] * rows  # of the drafts that had a right one before them
        self.calibration = 1.0  # accepted tokens by those that the drafter's confidence promised
        self.tells_itself = False  # whether the drafter says how sure it is
        self.pause = self.waiting = 0

    def choose(self, limits: list[int]) -> int:
        """How deep to draft now, 0 for a plain step."""
        deepest = min(self.depth, max(limits))
        if deepest == 0:
            return 0
        rows = len(limits)
        if self.timed and not self.forward:
            return 0  # the first step shows what a plain one costs
        if self.tells_itself and self.drafting.at(deepest) < CHEAP * self.forward.at(rows):
            return deepest  # and `cut` decides
        if self.waiting:
            self.waiting -= 1
            return 0 if self.waiting else deepest
        gains = [0.0] * (deepest + 1)
        for kept, tried, limit in zip(self.kept, self.tried, limits):
            reached = 1.0
            for depth in range(1, min(deepest, limit) + 1):
                reached *= kept / tried
                gains[depth] += reached
        total, rates = 0.0, []
        for depth in range(deepest + 1):
            total += gains[depth]
            rates.append((rows + total) / self._step(rows, depth, depth))
        best = max(range(deepest + 1), key=rates.__getitem__)
        if best == 0:
            self._wait()
        return best

    def cut(self, proposal: Proposal) -> Proposal | None:
        """As much of the proposal as pays; None for a plain step."""
        self.tells_itself = proposal.confidence is not None
        if not self.tells_itself:
            return proposal
        real = torch.arange(proposal.width, device=proposal.tokens.device) < proposal.counts[:, None]
        gains = (proposal.confidence * real).sum(0).tolist()
        rows, total = len(proposal.counts), 0.0
        best, best_rate = 0, rows / self._step(rows, 0, 0)
        for width, gain in enumerate(gains, 1):
            total += gain * self.calibration
            rate = (rows + total) / self._step(rows, width, 0)
            if rate > best_rate:
                best, best_rate = width, rate
        if best == 0 and self.waiting == 0:
            self._wait()
        elif best == 0:
            self.waiting -= 1
            if self.waiting == 0:
                best = min(4, proposal.width)
        return proposal.cut(best) if best else None

    def learn(self, proposal: Proposal | None, accepted: list[int], depths: list[int], draft_seconds, verify_seconds):
        """After a step: accepted and depths (the deepest draft) of each row."""
        rows = len(accepted)
        width = 0 if proposal is None else proposal.width
        if self.timed:
            self.forward.add(rows * (width + 1), verify_seconds)
        if proposal is None:
            return
        if self.timed:
            self.drafting.add(max(depths), draft_seconds)
        for row, (hits, depth) in enumerate(zip(accepted, depths)):
            if depth:
                self.kept[row] = DECAY * self.kept[row] + hits
                self.tried[row] = DECAY * self.tried[row] + min(hits + 1, depth)
        if proposal.confidence is not None:
            real = torch.arange(width, device=proposal.tokens.device) < proposal.counts[:, None]
            promised = (proposal.confidence * real).sum().item()
            if promised > 0:
                ratio = min(max((sum(accepted) + 0.1) / (promised + 0.1), 0.1), 2.0)
                self.calibration = DECAY * self.calibration + (1 - DECAY) * ratio
        if sum(accepted):
            self.pause = 0

    def select(self, rows: list[int]) -> None:
        self.kept, self.tried = [self.kept[row] for row in rows], [self.tried[row] for row in rows]

    def _step(self, rows: int, width: int, depth: int) -> float:
        """Seconds of a step that verifies `width` drafts a row, drafted `depth` deep."""
        if not self.timed:
            return 1.0 + self.draft_cost * depth
        return self.forward.at(rows * (width + 1)) + (self.drafting.at(depth) if depth else 0.0)

    def _wait(self) -> None:
        self.pause = min(max(FIRST_PAUSE, 2 * self.pause), LONGEST_PAUSE)
        self.waiting = self.pause
