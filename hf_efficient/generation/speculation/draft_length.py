"""How many tokens to draft, so that speculation pays: from what was accepted and from measured seconds."""

from collections.abc import Callable

from hf_efficient.generation.drafters.base import Proposal
from hf_efficient.generation.speculation.latency_model import DrafterStatistics, ModelLatency, latency_of


# Weight of what is known of a row's acceptance after a step with a draft, and after one without, of which so many count.
DECAY, FADE, MOST_FADED = 0.9, 0.97, 16
PRIOR = 2.0  # tokens that what was known before counts for
# A draft that costs less of a forward is made in every step, but while drafts do not pay in a batch of so many rows, only so
# often that it takes that share of the seconds of all forwards.
CHEAP, MANY, LOOKING = 0.03, 4, 0.004
# Of the seconds of a plain forward of a batch: what its slowest row takes anyway. Rows that are ahead should not draft more than
# they are sure of, as they will end before it.
SUNK = 0.3
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024  # plain steps between two trials of a drafter that does not pay, over runs
SOONER = 8  # so many times sooner comes the next trial after one in which all was right
# Recordings have to pay in what is left of the call, but for the first ones of a model, and for those that take no more than
# this share of the seconds of all its forwards: they pay in later calls. Reading prompts for trials takes no more either.
INVESTED = 0.03


class DraftLength:
    """Chooses, step by step, how deep to draft and how much of a proposal to verify: what gives most tokens a second.

    What is known of the model and the drafter stays from run to run: a drafter that did not pay on as many rows goes on
    resting. Where a row's next token is drawn from what a drawn draft leaves over, the draft's length changes which numbers
    are drawn, so it must not depend on a clock or on earlier runs: then `timed=False`, and every forward counts as one, a
    drafted token as `draft_cost` of one.

    Args:
        model: the target.
        rows: in the batch.
        depth: the deepest draft.
        draft_cost: seconds of drafting one token by those of a forward, where nothing is measured.
        padded: how many columns a forward of so many rows and columns computes.
        recording: seconds that the next forward of so many rows and columns takes to be recorded.
        draft: what is known of the drafter is kept with this.
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
        self.known = latency_of(model) if timed else ModelLatency()
        self.forward = self.known.forward
        self._of_drafter = {} if draft is None else self.known.drafters.setdefault(draft, {})
        self.drafter = self._of_drafter.setdefault(rows, DrafterStatistics())
        self.kept, self.tried = [0.0] * rows, [0.0] * rows  # of the drafts that had only right ones before them
        self.calibration = 1.0  # accepted tokens by those that the drafter's confidence promised
        self.out = False  # no draft is made in this run
        self.begun = False  # there was a draft
        self.starting = 0.0  # seconds of reading the prompts before it
        self.asked, self.on_trial = 0, False  # how deep to draft now, and only to see what it is worth
        self.usual, self.promise = 0.0, 0.0  # tokens that drafts promise a step: lately, and in this step

    @property
    def tells_itself(self) -> bool:
        """Whether the drafter says how sure it is."""
        return self.drafter.tells_itself

    def sits_out(self, steps: int) -> bool:
        """Whether the drafter, which rests for more steps than the run has, need not read the prompts: then no draft is made."""
        self.out = self.timed and self.drafter.waiting > steps and not self._is_cheap(1)
        return self.out

    def choose(self, limits: list[int]) -> int:
        """How deep to draft now, 0 for a plain step."""
        self.asked = self._depth(limits)
        return self.asked

    def _depth(self, limits: list[int]) -> int:
        rows, deepest = len(limits), min(self.depth, max(limits))
        self.growing, self.left = max(1, sum(limit > 0 for limit in limits)), max(limits) + 1
        self.promise, self.on_trial = 0.0, False
        if deepest == 0 or (self.timed and not self.forward.largest):
            return 0  # the first step shows what a plain one costs
        cheap, rests = self._is_cheap(deepest), self.drafter.waiting > 1
        if rests:
            self.drafter.waiting -= 1
            if not cheap or self.out or (rows >= MANY and self.drafter.waiting % self._looks_every(deepest)):
                return 0
        if self.out:
            return 0
        if cheap:
            return deepest  # and `cut` decides
        if self.drafter.waiting:  # after a rest what was seen before it counts less
            fade = FADE ** min(self.drafter.pause, MOST_FADED)
            self.kept, self.tried = ([fade * x for x in counts] for counts in (self.kept, self.tried))
        deepest = min(deepest, self.widest(rows))
        all_rows = self._acceptance()
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
        self.drafter.tells_itself = proposal.confidence is not None and proposal.probabilities is None
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
            self.known.credit += INVESTED * verify_seconds
            if settled:
                self.forward.add(tokens, verify_seconds)
            elif width and self.known.free:
                self.known.free -= 1
            elif width:
                self.known.credit -= max(0.0, verify_seconds - self.forward.at(tokens))
        if self.promise:
            self.usual = DECAY * self.usual + (1 - DECAY) * self.promise
        drafting = self.drafter.drafting
        if self.asked and not self.begun:  # drafters may read the prompts only then
            self.begun = True
            self.drafter.starting = self.starting + max(0.0, draft_seconds - drafting.at(self.asked))
            if drafting.largest:
                draft_seconds = drafting.at(self.asked)
        if not width:
            return
        drafting.add(max(depths), draft_seconds)
        for row, (hits, depth) in enumerate(zip(accepted, depths)):
            weight = DECAY if depth else FADE
            self.kept[row] = weight * self.kept[row] + hits
            self.tried[row] = weight * self.tried[row] + min(hits + 1, depth)
        if not self.on_trial:
            self.drafter.pause = self.drafter.waiting = 0
        elif accepted == depths:
            self.drafter.waiting = max(1, self.drafter.waiting // SOONER)
        if self.tells_itself:
            promised = sum(_promised(proposal))
            ratio = min((sum(accepted) + 0.5) / (promised + 0.5), 2.0)
            self.calibration = DECAY * self.calibration + (1 - DECAY) * ratio

    def end(self) -> None:
        """After the last step."""
        drafter, plain = self.drafter, self.forward.at(len(self.kept))
        drafter.acceptance = self._acceptance()
        if drafter.waiting and self.begun and plain:  # the next trial takes the prompts' reading too
            drafter.waiting = max(drafter.waiting, round(drafter.starting / (INVESTED * plain)))

    def select(self, rows: list[int]) -> None:
        self.end()
        self.kept, self.tried = [self.kept[row] for row in rows], [self.tried[row] for row in rows]
        before, self.drafter = self.drafter, self._of_drafter.setdefault(len(rows), DrafterStatistics())
        self.drafter.tells_itself = before.tells_itself

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
        if best or self.on_trial:
            self.on_trial = not best
            return best or 1
        drafter = self.drafter
        if drafter.waiting <= 1:
            self.on_trial = drafter.waiting == 1 and not self._to_be_paid(rows, 1)
            drafter.pause = drafter.waiting = min(max(FIRST_PAUSE, 2 * drafter.pause), LONGEST_PAUSE)
        return int(self.on_trial)

    def _acceptance(self) -> float:
        """Of all rows."""
        return (sum(self.kept) + self.drafter.acceptance * PRIOR) / (sum(self.tried) + PRIOR)

    def _is_cheap(self, depth: int) -> bool:
        return self.tells_itself and self.drafter.drafting.at(depth) < CHEAP * self.forward.at(len(self.kept))

    def _looks_every(self, depth: int) -> int:
        """Steps."""
        return max(1, round(self.drafter.drafting.at(depth) / (LOOKING * self.forward.at(len(self.kept)))))

    def _tokens(self, rows: int, width: int) -> int:
        """What a forward of `width` drafts a row computes."""
        return rows * self.padded(rows, width + 1)

    def _to_be_paid(self, rows: int, width: int) -> float:
        """Seconds of recording a forward of `width` drafts a row that what is left of this call has to win."""
        seconds = self.recording(rows, width + 1) if self.timed else 0.0
        return 0.0 if self.known.free or seconds <= self.known.credit else seconds

    def _seconds(self, rows: int, width: int, gain: float, drafts: bool) -> float:
        """Of a step that verifies `width` drafts a row, `gain` of which are right in all rows together."""
        if not self.timed:
            return 1.0 + self.draft_cost * width
        steps = self.left * self.growing / (self.growing + gain)
        if gain and not drafts:  # as many as promise so much
            steps = max(1.0, steps * min(1.0, self.usual / self.promise))
        seconds = self._to_be_paid(rows, width) if width else 0.0
        if drafts and width:
            drafting, seconds = (
                self.drafter.drafting.at(width),
                seconds + (0.0 if self.begun else self.drafter.starting),
            )
        else:
            drafting = 0.0
        return self.forward.at(self._tokens(rows, width)) + drafting + seconds / steps


def _promised(proposal: Proposal) -> list[float]:
    """The tokens of all rows that each place of the proposal adds, by the drafter's confidence."""
    promised = [0.0] * proposal.width  # in Python: of so few numbers operators take longer
    for confidence, count in zip(proposal.confidence.tolist(), proposal.counts.tolist()):
        for place in range(count):
            promised[place] += confidence[place]
    return promised
