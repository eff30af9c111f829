"""Which drafted tokens of many requests one forward verifies: those that give the highest throughput (Liu et al. 2024,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput")."""

from collections.abc import Callable

from hf_efficient.generation.speculation.draft_length import DRAFT_DECAY, MIN_PAUSE
from hf_efficient.generation.speculation.latency_model import LatencyCurve


MOST_PAUSE = 128  # steps: requests come and go, and a trial loses about one of them
MARGIN = (
    1.25  # what drafts are to win for every second that they take: requests without drafts wait for those of others
)


class RequestDraftPolicy:
    """Weighs the tokens that drafts will add against the seconds that they take, from measurements.

    Drafts of one request may pay where those of another do not. While none pay the drafter rests for some steps: 8 at
    first, twice as many each time that drafts were verified and still did not pay, at most `MOST_PAUSE`.

    Args:
        padded: tokens that a forward of so many tokens computes.
        most: tokens that a forward takes.
        forward_seconds: of the model, by tokens computed. Whoever runs it adds to them.

    Attributes:
        balance: seconds won by accepted drafts less those spent on drafting; older steps weigh less.
    """

    def __init__(self, padded: Callable[[int], int], most: int, forward_seconds: LatencyCurve):
        self.padded, self.most, self.forward_seconds = padded, most, forward_seconds
        self.balance = 0.0
        self._pause = self._steps_to_trial = 0

    def rests(self) -> bool:
        """Whether nothing is drafted in this step."""
        if not self.forward_seconds.largest:
            return True  # the first step measures a forward without drafts
        self._steps_to_trial -= self._steps_to_trial > 0
        return self._steps_to_trial > 0

    def count(self, won: float, spent: float, drafts: int) -> None:
        """Records a step that verified `drafts` drafts. won, spent: seconds that they saved and took."""
        self.balance = DRAFT_DECAY * self.balance + won - MARGIN * spent
        if self.balance >= 0:
            self._pause = 0
            return
        self.balance = 0.0
        if drafts:
            self._pause = min(max(MIN_PAUSE, 2 * self._pause), MOST_PAUSE)
        self._steps_to_trial = self._pause if drafts else MIN_PAUSE

    def seconds(self, tokens: int) -> float:
        """Of a forward of `tokens` tokens."""
        return self.forward_seconds.at(self.padded(tokens))

    def _weighed(self, tokens: int, drafts: int) -> float:
        """Seconds of a forward of `tokens` tokens and as many drafts, which count by the margin."""
        plain = self.seconds(tokens)
        return plain + MARGIN * (self.seconds(tokens + drafts) - plain)

    def share(self, chances: list[list[float]], growing: int, tokens: int) -> list[int]:
        """How many of its drafts each request gets verified.

        Args:
            chances: for each request, the probability of each of its drafts that it and those before it are accepted.
            growing: requests that get a token in this step.
            tokens: of the forward without drafts.
        """
        order = sorted(((chance, row) for row, own in enumerate(chances) for chance in own), reverse=True)
        order = order[: max(0, self.most - tokens)]
        best, gain, best_rate = 0, 0.0, growing / self.seconds(tokens)
        for count, (chance, _) in enumerate(order, 1):
            gain += chance
            if count < len(order) and self.padded(tokens + count + 1) > tokens + count + 1:
                continue  # the forward is padded, so it computes the next one anyway
            rate = (growing + gain) / self._weighed(tokens, count)
            if rate > best_rate:
                best, best_rate = count, rate
        counts = [0] * len(chances)
        for _, row in order[:best]:
            counts[row] += 1
        return counts

    def depth(
        self, acceptance: list[float], limits: list[int], growing: int, tokens: int, draft: Callable[[int], float]
    ) -> int:
        """How many tokens a draft model drafts for each request, as far as its limit allows.

        Args:
            acceptance: for each request, the probability that a draft is accepted, given that all before it are.
            limits: drafts that each request can use.
            draft: seconds of drafting for as many requests.
        """
        best, gain, added, cost = 0, 0.0, 0, 0.0
        best_rate, chances = growing / self.seconds(tokens), [1.0] * len(limits)
        for depth in range(1, max(limits, default=0) + 1):
            rows = [row for row, limit in enumerate(limits) if limit >= depth]
            for row in rows:
                chances[row] *= acceptance[row]
                gain += chances[row]
            added, cost = added + len(rows), cost + draft(len(rows))
            if tokens + added > self.most:
                break
            rate = (growing + gain) / (self._weighed(tokens, added) + MARGIN * cost)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best
