"""Steps of continuous batching in which all requests decode, as in most. transformers asks for each request what only
one that reads its prompt may answer differently; here these steps are scheduled at once."""

import functools
from operator import attrgetter, is_

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestStatus


_FUTURES = "_hf_efficient_futures"  # attribute of a scheduler: the last step of this kind


def at_once(original):
    """transformers' `schedule_batch`, for caches whose blocks alone limit a step: those of which one allocator serves
    all layers, and no index names the tokens that are read."""

    @functools.wraps(original)
    def schedule_batch(self, token_budget, cache_budget):
        futures = _all_that_decode(self, token_budget)
        return original(self, token_budget, cache_budget) if futures is None else (futures, False, len(futures), 0)

    schedule_batch._hf_efficient = True
    return schedule_batch


def _all_that_decode(scheduler, token_budget: int) -> list[FutureRequestState] | None:
    """The step in which every request gets its next token; None where transformers decides who does."""
    cache, states = scheduler.cache, [*scheduler.active_requests.values()]
    allocator, decoding = getattr(cache, "only_allocator", None), RequestStatus.DECODING
    if allocator is None or cache.read_cache_limit != 0 or scheduler.waiting_requests:
        return None
    if not 0 < len(states) <= min(token_budget, scheduler.max_requests_per_batch):
        return None
    if any([state.status is not decoding for state in states]):
        return None
    scheduler._try_to_meet_safety_margin()  # which frees blocks
    scheduler.starved_requests = []
    page = allocator.tokens_per_page
    used = [state.position_offset % page for state in states]  # tokens in the last page, 0 where a new one is needed
    if 0 in used and not all([at or cache.can_store_request_tokens(state, 1) for at, state in zip(used, states)]):
        return None
    futures = getattr(scheduler, _FUTURES, [])
    if len(futures) != len(states) or not all(map(is_, map(attrgetter("state"), futures), states)):
        futures = [FutureRequestState(state, True, {}, 1) for state in states]
        setattr(scheduler, _FUTURES, futures)
    if cache.use_prefix_sharing:
        for future, at in zip(futures, used):
            future.complete_blocks = cache.count_new_complete_blocks(future.state, 1) if at == page - 1 else {}
    return futures
