"""Whether the leading tokens of a stored prompt are computed again, because that is faster than reading them.

Paper: Yu et al., Stateful Large Language Model Serving with Pensieve (https://arxiv.org/abs/2312.05516): the cost of a
token grows with its position, so the first ones are the cheapest to compute.
"""

import time


_WEIGHT = 0.3  # of a new measurement


class Rates:
    """Speeds of computing and of reading, from what was measured so far.

    token_flops: of a token without attention. position_flops: more for each token before it.
    """

    def __init__(self, token_flops: float, position_flops: float):
        self._flops = token_flops, position_flops
        self.seconds_per_flop: float | None = None
        self.seconds_per_byte: dict[int, float] = {}  # by tier
        self.clock = time.perf_counter

    def computed(self, start: int, tokens: int, seconds: float) -> None:
        """Notes that `tokens` tokens from position `start` on took `seconds`."""
        self.seconds_per_flop = _mean(self.seconds_per_flop, seconds / self.flops(start, tokens))

    def was_read(self, tier: int, size: int, seconds: float) -> None:
        """Notes that `size` bytes of a tier took `seconds`."""
        self.seconds_per_byte[tier] = _mean(self.seconds_per_byte.get(tier), seconds / size)

    def flops(self, start: int, tokens: int) -> float:
        """Of `tokens` tokens from position `start` on."""
        fixed, growing = self._flops
        return tokens * (fixed + growing * (start + (tokens - 1) / 2))

    def leading_blocks(self, tiers: list[list[int]], block_size: int, block_bytes: int) -> int:
        """How many of the leading blocks of a batch of prompts are to be computed, so that it takes least time.

        tiers: for each block of the prompts, where it lies of each sequence. Blocks of the pool, tier 0, cost nothing,
        and so do tiers that were never read.
        """
        if self.seconds_per_flop is None:
            return 0
        rates = {0: 0.0, **self.seconds_per_byte}
        reading = [sum(rates.get(tier, 0.0) for tier in sequences) * block_bytes for sequences in tiers]
        best, chosen, left = sum(reading), 0, sum(reading)
        for number, (seconds, sequences) in enumerate(zip(reading, tiers), 1):
            left -= seconds
            cost = left + len(sequences) * self.flops(0, number * block_size) * self.seconds_per_flop
            if cost < best:
                best, chosen = cost, number
        return chosen


def rates_of(model, config) -> Rates:
    """What a token costs: two operations for each weight of a linear layer, and four for each number of a key."""
    weights = sum(
        module.in_features * module.out_features for module in model.modules() if hasattr(module, "out_features")
    )
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Rates(2.0 * weights, 4.0 * config.num_hidden_layers * width)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
