"""`ContinuousBatchingConfig(max_ms_between_tokens=...)`: transformers' schedulers are given fewer tokens for a step, so
that prompts come in parts."""

import functools

from hf_efficient.generation.replay.captured_step import padded
from hf_efficient.generation.speculation.latency_model import LatencyCurve
from hf_efficient.generation.step_budget import StepBudget


_BUDGET = "_hf_efficient_budget"  # attribute of a cache


def measured(cache, milliseconds: float | None) -> LatencyCurve:
    """The seconds of forwards over `cache`, by tokens computed, to be added by whoever runs them. With them its
    scheduler makes steps that take at most `milliseconds` while sequences decode; None: as long as they take."""
    latency = LatencyCurve()
    setattr(cache, _BUDGET, None if milliseconds is None else StepBudget(milliseconds / 1e3, latency, padded))
    return latency


def within_budget(original):
    """transformers' `schedule_batch`, for caches with a budget."""

    @functools.wraps(original)
    def schedule_batch(self, token_budget, cache_budget):
        budget = getattr(self.cache, _BUDGET, None)
        if budget is not None:
            decoding = sum(not state.remaining_prefill_tokens for state in self.active_requests.values())
            token_budget = budget.tokens(decoding, token_budget)
        return original(self, token_budget, cache_budget)

    schedule_batch._hf_efficient = True
    return schedule_batch
