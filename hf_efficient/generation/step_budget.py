"""How many tokens a step of continuous batching may have, so that sequences that decode get tokens often enough."""

from collections.abc import Callable

from hf_efficient.generation.speculation.latency_model import LatencyCurve


LEAST_PROMPT_TOKENS = 16  # in a step, however short the budget is: prompts must get on


class StepBudget:
    """Cuts prompts into parts by measured seconds (chunked prefill; Agrawal et al. 2023, "Sarathi").

    Args:
        seconds: that a step may take while sequences decode.
        latency: of forwards, by tokens computed.
        padded: tokens that a forward of so many tokens computes.
    """

    def __init__(self, seconds: float, latency: LatencyCurve, padded: Callable[[int], int]):
        self.seconds, self.latency, self.padded = seconds, latency, padded

    def tokens(self, decoding: int, most: int) -> int:
        """Tokens of a step in which `decoding` sequences get one each, at most `most`."""
        if not decoding or not self.latency.largest:
            return most
        low, high = min(most, decoding + LEAST_PROMPT_TOKENS), most
        while low < high:  # the curve never falls
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._predicted(middle) <= self.seconds else (low, middle - 1)
        return low

    def _predicted(self, tokens: int) -> float:
        tokens, largest = self.padded(tokens), self.latency.largest
        return self.latency.at(tokens) * max(1.0, tokens / largest)
