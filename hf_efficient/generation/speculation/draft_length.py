"""How many tokens to draft, so that speculation pays: from acceptance statistics and measured seconds."""

from collections.abc import Callable

from hf_efficient.generation.speculation.latency_model import CREDIT, AcceptanceStatistics, LatencyModel
from hf_efficient.generation.speculation.proposal import Proposal


# A sequence's counts of accepted and proposed tokens are multiplied by this in a step with a draft of it, and in one
# without. After a pause they are multiplied by `IDLE_DECAY` once for each of its steps, at most `MAX_IDLE_STEPS` times.
DRAFT_DECAY, IDLE_DECAY, MAX_IDLE_STEPS = 0.9, 0.97, 16
PRIOR_TOKENS = 2.0  # proposed tokens that the acceptance of earlier calls weighs as much as
# As many of earlier calls count beside those of a call when it ends: how a text ends says little of the next one.
EARLIER_TOKENS = 32.0
# A draft that takes less than this share of a forward is made in every step; `trim` then decides how much is verified.
CHEAP_DRAFT = 0.03
# But not in a batch of so many sequences while drafts do not pay.
WATCH_MIN_ROWS = 4
# Share of a plain forward of a batch that its slowest sequence needs anyway. Sequences that are ahead of it end
# earlier, so their drafts have to be surer.
SLOWEST_ROW_SHARE = 0.3
MIN_PAUSE, MAX_PAUSE = 8, 4096  # plain steps between two trials of a drafter that does not pay; doubled each time
REST_STEPS_TIMED = 8  # while drafting rests, the forward of every so many steps is timed
RETRY_FACTOR = 8  # after a trial in which every draft was accepted the next one comes this many times sooner
# Captures must win back their seconds within the call. Exempt are the first ones of a model, and those that take no
# more than these shares of the seconds of all its forwards and of what its drafts have saved: later calls replay them.
# Reading prompts for trials takes no more than the first share either.
INVESTED_SHARE, SAVED_SHARE = 0.003, 0.05
LOST_SHARE = 0.002  # of all steps, that drafts may cost in the long run
MOST_DEBT = 12.0  # plain steps that are remembered as lost
# Another text shows by so many plain steps that the drafts of one step save: then what was lost is forgotten. And by so
# many tokens in a row that have come a second time.
PROOF, SURE_REPEAT = 1.0, 20


class DraftLengthPolicy:
    """Chooses in every step how deep to draft and how much of a proposal to verify: what gives the most tokens per
    second.

    The latency model and the acceptance statistics outlive the call. A drafter that did not pay on the same number of
    sequences continues its pause. One whose drafts have saved steps in a call starts the next call without a pause.

    The cost of drafts is bounded, as this class counts it. Of n steps they may cost `LOST_SHARE` of n, including the
    reading of prompts, and `INVESTED_SHARE` of n for reading prompts for trials. In addition they may cost `CREDIT`
    plain steps, the first captures, `SAVED_SHARE` of what was saved in other calls, and what a call loses before it
    ends. (During a call accepted tokens count by their mean over the sequences, and only at its end by the number of
    steps by which the longest sequence ended sooner.) A drafter that has lost more rests until that is saved again, or
    until one step of a trial saves `PROOF`. Trials come after pauses that double.

    With `timed=False` the choice depends on neither a clock nor earlier calls: a forward counts as 1, a drafted token
    as `draft_cost`. Sampled runs with a drafter that samples need this, because there the length of a draft determines
    which random numbers the target's tokens are sampled with.

    Args:
        rows: sequences in the batch.
        depth: the deepest draft, in tokens.
        latency: of the target.
        statistics: sequences in the batch -> statistics of the drafter on such batches; entries are added.
        draft_cost: time of drafting one token, relative to a forward, for `timed=False`.
        padded: (sequences, positions) -> how many positions a forward of that size computes.
        capture_seconds: (sequences, positions) -> seconds of capturing the next such forward, 0.0 if it needs none.
        captures_so_far: how many captures the process has made so far.
    """

    def __init__(
        self,
        rows: int,
        depth: int,
        latency: LatencyModel | None = None,
        statistics: dict[int, AcceptanceStatistics] | None = None,
        timed: bool = True,
        draft_cost: float = 0.0,
        padded: Callable[[int, int], int] = lambda rows, columns: columns,
        capture_seconds: Callable[[int, int], float] = lambda rows, columns: 0.0,
        captures_so_far: Callable[[], int] = lambda: 0,
    ):
        self.depth, self.timed, self.draft_cost = depth, timed, draft_cost
        self.padded, self.capture_seconds, self.captures_so_far = padded, capture_seconds, captures_so_far
        self.latency = latency if timed and latency is not None else LatencyModel()
        self.forward_seconds = self.latency.forward_seconds
        self._by_rows = statistics if timed and statistics is not None else {}
        self.statistics = self._by_rows.setdefault(rows, AcceptanceStatistics())
        self.unfinished, self.tokens_left = rows, 1  # sequences that still grow, and tokens of the longest way to go
        self.accepted, self.proposed = [0.0] * rows, [0.0] * rows  # decayed counts of each sequence's drafted tokens
        self._all_accepted = self._all_proposed = 0  # of all sequences, since the statistics were last written
        self.calibration = 1.0  # accepted tokens by those that the drafter's confidence predicted
        self.is_off = False  # no draft is made in this call
        self.has_drafted = False  # in this call
        self._reads_prompts = True  # in this call, before its first draft, which is not yet accounted for
        self._is_awake = self._was_woken = False  # to draft in the next step, and to have done so in this one
        self.prompt_seconds = 0.0  # of reading the prompts, where the drafter did so before its first proposal
        self._captures, self._is_draft_steady = 0, True  # before the proposal, and whether there were none for it
        self.chosen_depth, self.is_trial = 0, False  # of this step, and whether it only shows if drafts pay again
        self.predicted, self.mean_predicted = 0.0, 0.0  # accepted tokens predicted for this step, and a running mean
        self._begin_account(1)

    @property
    def has_confidence(self) -> bool:
        return self.statistics.has_confidence

    def skips_call(self, steps: int) -> bool:
        """Whether the drafter's pause outlasts a call of `steps` steps: no draft is made, and no prompt read for it."""
        self.is_off = self.timed and self.statistics.steps_to_trial > steps and not self._is_cheap(1)
        return self.is_off

    @property
    def watches(self) -> bool:
        """Whether the next step drafts nothing unless the drafter `stirs`. In a call that is skipped it does not: the
        drafter has read no prompt."""
        is_free = len(self.accepted) < WATCH_MIN_ROWS and self._is_cheap(1)
        return self.statistics.steps_to_trial > 1 and not is_free and not self.is_off

    def wake(self, repeated: int) -> None:
        """The next step drafts as deep as it can, and later ones if that pays. repeated: how many tokens in a row have
        come a second time; where drafts have cost too much, fewer than `SURE_REPEAT` are not enough."""
        if self.statistics.balance < 0 and repeated < SURE_REPEAT:
            return
        self.statistics.steps_to_trial, self._is_awake = 0, True

    def rests(self) -> bool:
        """Whether the next step drafts nothing, whatever its sequences can use: then nothing else is asked."""
        statistics, rows = self.statistics, len(self.accepted)
        if statistics.steps_to_trial <= 1 or (rows < WATCH_MIN_ROWS and self._is_cheap(self.depth)):
            return False
        statistics.steps_to_trial -= 1
        self.chosen_depth, self.predicted, self.is_trial = 0, 0.0, False
        return True

    def depths(self, limits: list[int], unfinished: int | None = None) -> list[int]:
        """How deep to draft now for each sequence, with the arguments of `choose`."""
        depth = self.choose(limits, unfinished)
        return [min(limit, depth) for limit in limits]

    def choose(self, limits: list[int], unfinished: int | None = None) -> int:
        """How deep to draft now, 0 for a plain step.

        limits: drafts that each sequence can still use. unfinished: sequences that have not ended, of which one that
            lacks a single token has the limit 0; None for those with a limit above 0.
        """
        self._captures, self._is_draft_steady = self.captures_so_far(), True
        growing = sum(limit > 0 for limit in limits)
        self.unfinished = max(1, growing if unfinished is None else unfinished)
        self.chosen_depth = self._choose(limits)
        return self.chosen_depth

    def _choose(self, limits: list[int]) -> int:
        """The depth that saves most time by the statistics so far; 0 where the drafter rests."""
        rows, deepest, statistics = len(limits), min(self.depth, max(limits)), self.statistics
        self.tokens_left = max(limits) + 1
        self.predicted, self.is_trial, self._was_woken = 0.0, False, False
        if deepest == 0 or (self.timed and not self.forward_seconds.largest):
            return 0  # the first step measures a plain forward
        if self.rests() or self.is_off:
            return 0
        if statistics.steps_to_trial > 1:  # a cheap drafter's pause goes on
            statistics.steps_to_trial -= 1
        self._was_woken, self._is_awake = self._is_awake, False
        if self._was_woken or (self._is_cheap(deepest) and statistics.balance >= 0):
            return deepest
        if statistics.steps_to_trial:
            decay = IDLE_DECAY ** min(statistics.pause_steps, MAX_IDLE_STEPS)
            self.accepted, self.proposed = ([decay * x for x in counts] for counts in (self.accepted, self.proposed))
        deepest = min(deepest, self.max_width(rows))
        prior = self._acceptance()
        gains = [0.0] * deepest
        for accepted, proposed, limit in zip(self.accepted, self.proposed, limits):
            acceptance, reached = (accepted + prior * PRIOR_TOKENS) / (proposed + PRIOR_TOKENS), 1.0
            for depth in range(min(deepest, limit)):
                reached *= acceptance
                gains[depth] += reached
        return self._best_width(rows, gains, is_drafted=False)

    def trim(self, proposal: Proposal) -> Proposal | None:
        """As much of the proposal as pays; None for a plain step."""
        self._see(proposal)
        if not self.has_confidence:
            return proposal
        rows = len(proposal.counts)
        gains = [gain * self.calibration for gain in _predicted_gains(proposal)[: self.max_width(rows)]]
        width = self._best_width(rows, gains, is_drafted=True)
        return proposal.truncated(width) if width else None

    def _see(self, proposal: Proposal) -> None:
        """Notes what kind of proposals these are, and whether something was captured for this one."""
        # trimming drawn tokens by their confidence would change the distribution of what is drawn
        self.statistics.has_confidence = proposal.confidence is not None and proposal.probabilities is None
        self._is_draft_steady = self.captures_so_far() == self._captures

    def update(
        self,
        proposal: Proposal | None,
        accepted: list[int],
        depths: list[int],
        draft_seconds: float,
        verify_seconds: float,
        is_steady: bool = True,
        tokens: int | None = None,
    ) -> None:
        """Learns from a step in which `proposal` was verified. accepted, depths: of each sequence, tokens accepted and
        depth of its deepest draft. is_steady: False where such steps will take less time from now on, as this one
        captured its forward. tokens: that its forward computed; None for those of a padded one. Where something was
        captured for the proposal, its seconds are left out."""
        width, statistics = 0 if proposal is None else proposal.width, self.statistics
        self._steps += 1
        is_at_rest = not width and not self.chosen_depth and statistics.steps_to_trial > 1
        if self.timed and is_at_rest and statistics.steps_to_trial % REST_STEPS_TIMED:
            self._set_balance(statistics.balance + LOST_SHARE)
            return
        if self.timed:
            tokens = self._tokens(len(accepted), width) if tokens is None else tokens
            self._add_forward(tokens, width, verify_seconds, is_steady)
        if self.predicted:
            self.mean_predicted = DRAFT_DECAY * self.mean_predicted + (1 - DRAFT_DECAY) * self.predicted
        curve = statistics.draft_seconds
        is_first, self.has_drafted = not self.has_drafted, self.has_drafted or self.chosen_depth > 0
        # drafters may read the prompts in their first proposal
        if self.chosen_depth and is_first and self._is_draft_steady:
            statistics.prompt_seconds = self.prompt_seconds + max(0.0, draft_seconds - curve.at(self.chosen_depth))
            if curve.largest:
                draft_seconds = curve.at(self.chosen_depth)
        deepest = max(depths) if width else self.chosen_depth  # without a width it was drafted, and not verified
        if deepest and self._is_draft_steady:
            curve.add(deepest, draft_seconds)
        has_recovered = self.timed and self._settle(sum(accepted), tokens)
        if not width:
            return
        for row, (hits, depth) in enumerate(zip(accepted, depths)):
            decay = DRAFT_DECAY if depth else IDLE_DECAY
            self.accepted[row] = decay * self.accepted[row] + hits
            known = min(hits + 1, depth)  # those after a rejected one: unknown
            self.proposed[row] = decay * self.proposed[row] + known
            self._all_accepted, self._all_proposed = self._all_accepted + hits, self._all_proposed + known
        if not self.is_trial or has_recovered:
            statistics.pause_steps = statistics.steps_to_trial = 0
        elif accepted == depths:
            statistics.steps_to_trial = max(1, statistics.steps_to_trial // RETRY_FACTOR)
        if self.has_confidence:
            ratio = min((sum(accepted) + 0.5) / (sum(_predicted_gains(proposal)) + 0.5), 2.0)
            self.calibration = DRAFT_DECAY * self.calibration + (1 - DRAFT_DECAY) * ratio

    def _settle(self, accepted: int, tokens: int) -> bool:
        """Counts what a step has saved and cost, also by a draft that was not verified. tokens: of its forward. Returns
        whether it has made up for what was lost before."""
        statistics, plain = self.statistics, self.forward_seconds.at(self._tokens(len(self.accepted), 0))
        change = LOST_SHARE
        if self.chosen_depth and plain:
            believed = accepted / self.unfinished * (1 - SLOWEST_ROW_SHARE * (1 - 1 / self.unfinished))
            spent = statistics.draft_seconds.at(self.chosen_depth) + self.forward_seconds.at(tokens)
            extra = max(0.0, spent / plain - 1)
            self._extra += extra
            change += believed - extra
            self.latency.capture_budget += SAVED_SHARE * max(0.0, change) * plain
        before = statistics.balance
        self._set_balance(before + change)
        if change >= PROOF:
            self._balance_before, statistics.balance = max(self._balance_before, 0.0), max(statistics.balance, 0.0)
        return before < 0 <= statistics.balance

    def _set_balance(self, balance: float) -> None:
        self.statistics.balance = min(CREDIT, max(-MOST_DEBT, balance))

    def _begin_account(self, generated: int) -> None:
        """Of a batch of this size. generated: tokens of its longest sequence."""
        self._generated_before, self._balance_before = generated, self.statistics.balance
        self._steps, self._extra = 0, 0.0  # steps from now on, and plain steps that drafts have cost in them

    def _add_forward(self, tokens: int, width: int, seconds: float, is_steady: bool) -> None:
        latency = self.latency
        latency.capture_budget += INVESTED_SHARE * seconds
        if is_steady:
            self.forward_seconds.add(tokens, seconds)
        elif width and latency.free_captures:
            latency.free_captures -= 1
        elif width:
            latency.capture_budget -= max(0.0, seconds - self.forward_seconds.at(tokens))

    def finish(self, generated: int | None = None) -> None:
        """After the last step of a batch of this size: stores for the next call the acceptance, and what drafts saved.

        generated: tokens of the longest sequence in this call; None where that is not known.
        """
        statistics, plain, saved = self.statistics, self.forward_seconds.at(len(self.accepted)), 0.0
        if generated is not None and self.timed and self.has_drafted and plain:
            reading = statistics.prompt_seconds / plain if self._reads_prompts else 0.0
            saved = generated - self._generated_before - self._steps - self._extra - reading
            self._set_balance(self._balance_before + saved + LOST_SHARE * self._steps)
            self._reads_prompts = False
        earlier = EARLIER_TOKENS * statistics.acceptance
        statistics.acceptance = (self._all_accepted + earlier) / (self._all_proposed + EARLIER_TOKENS)
        self._all_accepted = self._all_proposed = 0
        if saved > 0 and statistics.balance >= 0:
            statistics.pause_steps = statistics.steps_to_trial = 0
        elif statistics.balance < 0 and statistics.steps_to_trial and self.has_drafted and plain:  # trials read prompts
            steps = round(statistics.prompt_seconds / (INVESTED_SHARE * plain))
            statistics.steps_to_trial = max(statistics.steps_to_trial, steps)

    def select(self, rows: list[int], generated: int | None = None) -> None:
        """Only these sequences (indices into those so far) go on. generated: tokens of the longest of them."""
        self.finish(generated)
        self.accepted, self.proposed = ([counts[row] for row in rows] for counts in (self.accepted, self.proposed))
        has_confidence = self.has_confidence
        self.statistics = self._by_rows.setdefault(len(rows), AcceptanceStatistics())
        self.statistics.has_confidence = has_confidence
        self._begin_account(generated or 1)

    def max_width(self, rows: int) -> int:
        """The most drafts a sequence to try: they at most double the tokens of the largest forward measured."""
        return max(4, 2 * (self.forward_seconds.largest // rows)) - 1 if self.timed else self.depth

    def _best_width(self, rows: int, gains: list[float], is_drafted: bool) -> int:
        """The width that gives most tokens a second; 1 in a trial.

        gains: the expected tokens that each drafted position adds, over all sequences.
        is_drafted: the tokens are there, so the seconds of drafting them do not count.
        """
        self.predicted = sum(gains)
        plain = self._step_seconds(rows, 0, 0.0, is_drafted)
        sunk = SLOWEST_ROW_SHARE * (1 - 1 / self.unfinished) * plain
        best, total, best_rate = 0, 0.0, self.unfinished / (plain - sunk)
        for width, gain in enumerate(gains, 1):
            total += gain
            if is_drafted and width < len(gains) and self.padded(rows, width + 1) > width + 1:
                continue  # the forward is padded, so it computes the next position anyway
            rate = (self.unfinished + total) / (self._step_seconds(rows, width, total, is_drafted) - sunk)
            if rate > best_rate:
                best, best_rate = width, rate
        if is_drafted and not best and rows == 1 and not self.is_trial and self.statistics.balance >= 0:
            return 0  # these tokens are not worth it, the next ones may be
        return self._or_trial(best)

    def _or_trial(self, best: int) -> int:
        """`best`, or where that is 0 what a trial drafts, 1, and 0 while drafting rests. A drafter that has cost too
        much rests, whatever it promises, unless it was woken."""
        has_lost = self.statistics.balance < 0
        if (best and (self._was_woken or not has_lost)) or self.is_trial:
            self.is_trial = not best or has_lost
            return best or 1
        statistics = self.statistics
        if statistics.steps_to_trial <= 1:
            self.is_trial = statistics.steps_to_trial == 1 and not self._unpaid_capture_seconds(len(self.accepted), 1)
            statistics.pause_steps = min(max(MIN_PAUSE, 2 * statistics.pause_steps), MAX_PAUSE)
            statistics.steps_to_trial = statistics.pause_steps
        return int(self.is_trial)

    def _acceptance(self) -> float:
        """Over all sequences."""
        prior = self.statistics.acceptance * PRIOR_TOKENS
        return (sum(self.accepted) + prior) / (sum(self.proposed) + PRIOR_TOKENS)

    def _is_cheap(self, depth: int) -> bool:
        seconds = self.statistics.draft_seconds.at(depth)
        return self.has_confidence and seconds < CHEAP_DRAFT * self.forward_seconds.at(len(self.accepted))

    def _tokens(self, rows: int, width: int) -> int:
        """Tokens that a forward of `width` drafts a sequence computes."""
        return rows * self.padded(rows, width + 1)

    def _unpaid_capture_seconds(self, rows: int, width: int) -> float:
        """Seconds of capturing a forward of `width` drafts a sequence that the rest of this call has to win back."""
        return self._unpaid(self.capture_seconds(rows, width + 1) if self.timed else 0.0)

    def _unpaid(self, seconds: float) -> float:
        """Of a capture that takes so many seconds, those that the rest of this call has to win back."""
        return 0.0 if self.latency.free_captures or seconds <= self.latency.capture_budget else seconds

    def _step_seconds(self, rows: int, width: int, gain: float, is_drafted: bool) -> float:
        """Seconds of a step that verifies `width` drafts a sequence and accepts `gain` tokens in all sequences
        together, with its share of what is paid once in this call: the capture, and reading the prompts."""
        if not self.timed:
            return 1.0 + self.draft_cost * width
        steps = self.tokens_left * self.unfinished / (self.unfinished + gain)
        if gain and is_drafted:  # steps whose confidence predicts as much as this one's
            steps = max(1.0, steps * min(1.0, self.mean_predicted / self.predicted))
        once = self._unpaid_capture_seconds(rows, width) if width else 0.0
        seconds = self.forward_seconds.at(self._tokens(rows, width))
        if width and not is_drafted:
            seconds += self.statistics.draft_seconds.at(width)
            once += 0.0 if self.has_drafted else self.statistics.prompt_seconds
        return seconds + once / steps


def _predicted_gains(proposal: Proposal) -> list[float]:
    """The accepted tokens of all sequences that each position of the proposal adds, by the drafter's confidence."""
    gains = [0.0] * proposal.width  # in Python: torch's calls take longer than the work on so few numbers
    for confidence, count in zip(proposal.confidence.tolist(), proposal.counts.tolist()):
        for position in range(count):
            gains[position] += confidence[position]
    return gains
