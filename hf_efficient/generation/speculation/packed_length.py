"""How many tokens to draft for each sequence of a batch whose forwards leave out padding."""

from collections.abc import Callable

import numpy as np

from hf_efficient.generation.speculation.draft_length import DRAFT_DECAY, DraftLengthPolicy
from hf_efficient.generation.speculation.proposal import Proposal


# What a drafter promised a sequence and what came of it weigh as much as so many tokens at first.
PRIOR_TOKENS = 3.0
# What a step saved is worth, by the base time of a forward. On copying answers of SmolLM2-135M in batches of eight,
# with simulated seconds, 1 takes up to 4 % longer and 3 up to 6 %.
STEP_VALUE = 1.5


class PackedLengthPolicy(DraftLengthPolicy):
    """A `DraftLengthPolicy` that gives each sequence its own draft length, by what its tokens gain.

    A forward takes a base time and additional time per token. An accepted token saves its own time later, and takes its
    sequence a step further. That saves the base time as far as the batch waits for this sequence.

    Args:
        packed: how many tokens a forward of this many tokens of all sequences computes; None if it is too large.
        packed_capture_seconds: (sequences, tokens) -> seconds of capturing the next such forward.
    """

    def __init__(
        self, rows: int, depth: int, *arguments, packed: Callable, packed_capture_seconds: Callable, **options
    ):
        super().__init__(rows, depth, *arguments, **options)
        self.packed, self.packed_capture_seconds = packed, packed_capture_seconds
        self.right, self.promised = np.full(rows, PRIOR_TOKENS), np.full(rows, PRIOR_TOKENS)
        self.pace = np.ones(rows)  # tokens of a step, a running mean
        self.limits = [1] * rows

    def depths(self, limits: list[int], unfinished: int | None = None) -> list[int]:
        self.limits = limits
        depths = super().depths(limits, unfinished)
        if self.has_confidence or not any(depths) or self.is_trial:
            return depths
        prior = self._acceptance()
        chances = np.zeros((len(limits), max(depths)))
        for row, (accepted, proposed, depth) in enumerate(zip(self.accepted, self.proposed, depths)):
            acceptance = (accepted + prior * 2) / (proposed + 2)
            chances[row, :depth] = acceptance ** np.arange(1, depth + 1)
        own = self._best_counts(chances)
        return own if any(own) else depths

    def trim(self, proposal: Proposal) -> Proposal | None:
        self._see(proposal)
        if not self.has_confidence:
            return proposal
        chances = proposal.confidence.numpy(force=True).astype(np.float64)
        is_real = np.arange(proposal.width) < proposal.counts.numpy(force=True)[:, None]
        chances = np.where(is_real, chances, 0.0)
        trusted = np.minimum(chances * (self.right / self.promised)[:, None], 1.0)
        counts = self._best_counts(trusted)
        self.predicted = float(sum(trusted[row, :count].sum() for row, count in enumerate(counts)))
        if not self._or_trial(max(counts)):
            return None
        if not any(counts):
            counts = np.minimum(1, proposal.counts.numpy(force=True)).tolist()  # a trial
        self._promised_now = np.array([chances[row, :count].sum() for row, count in enumerate(counts)])
        return proposal.cut(counts)

    def _best_counts(self, chances: np.ndarray) -> list[int]:
        """How many leading drafts of each sequence to verify. chances: float [rows, width] that a draft is accepted,
        descending along a row and 0 where there is none."""
        rows, width = chances.shape
        going = np.array(self.limits) > 0
        plain = self.unfinished
        curve = self.forward_seconds
        start = curve.at(self.packed(plain))
        largest = max(curve.largest, plain)
        of_token = (curve.at(largest) - start) / (largest - plain) if largest > plain else 0.0
        base = max(start - of_token * plain, 0.0)
        way = np.where(going, (np.array(self.limits) + 1) / self.pace, 0.0)
        share = way / way.sum()
        before = 1 + chances.cumsum(1) - chances  # tokens of the step up to this draft
        gains = (chances * (of_token + STEP_VALUE * share[:, None] * base / before)).flatten()
        most = min(int((chances > 0).sum()), max(4 * rows, 2 * largest) - plain)
        if most <= 0:
            return [0] * rows
        order = np.argsort(-gains, kind="stable")[:most]
        total, best, best_gain, count, steps = gains[order].cumsum(), 0, 0.0, 0, max(1.0, way.max())
        while count < most and (tokens := self.packed(plain + count + 1)) is not None:
            count = min(tokens - plain, most)  # a forward computes its padding anyway
            once = self._unpaid(self.packed_capture_seconds(rows, tokens)) / steps
            gain = total[count - 1] - (curve.at(tokens) - start) - once
            if gain > best_gain:
                best, best_gain = count, gain
        return np.bincount(order[:best] // width, minlength=rows).tolist()

    def _unpaid_capture_seconds(self, rows: int, width: int) -> float:
        tokens = self.unfinished * (width + 1)
        computed = self.packed(tokens)
        if computed is None or computed > rows * self.padded(rows, width + 1):  # then it is padded
            return super()._unpaid_capture_seconds(rows, width)
        return self._unpaid(self.packed_capture_seconds(rows, tokens))

    def update(self, proposal: Proposal | None, accepted: list[int], depths: list[int], *measured) -> None:
        super().update(proposal, accepted, depths, *measured)
        if proposal is None and self.statistics.steps_to_trial > 1:
            return  # while drafting rests, nothing is learned of it
        going = np.array(self.limits) > 0
        accepted = np.array(accepted)
        self.pace = np.where(going, DRAFT_DECAY * self.pace + (1 - DRAFT_DECAY) * (1 + accepted), self.pace)
        if proposal is not None and self.has_confidence:
            drafted = self._promised_now > 0
            self.right = np.where(drafted, DRAFT_DECAY * self.right + accepted, self.right)
            self.promised = np.where(drafted, DRAFT_DECAY * self.promised + self._promised_now, self.promised)

    def select(self, rows: list[int], generated: int | None = None) -> None:
        super().select(rows, generated)
        self.right, self.promised, self.pace = (each[rows] for each in (self.right, self.promised, self.pace))
        self.limits = [self.limits[row] for row in rows]


def length_policy(rows: int, *arguments, timed: bool, target, **options) -> DraftLengthPolicy:
    """The policy for a batch of `rows` sequences of `target`, a `RaggedModel`. Other arguments are those of
    `DraftLengthPolicy`."""
    if timed and rows > 1 and target.packs and target.packed_width(rows) is not None:
        options |= {"packed": target.packed_width, "packed_capture_seconds": target.packed_capture_seconds}
        return PackedLengthPolicy(rows, *arguments, timed=timed, **options)
    return DraftLengthPolicy(rows, *arguments, timed=timed, **options)
