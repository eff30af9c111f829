"""Requests that continuous batching cannot run are refused alone, where transformers would end the loop for all."""

import functools
import operator

from transformers.utils import logging

from hf_efficient.integrations import transformers_request_options as request_options


logger = logging.get_logger(__name__)
_CAPACITY = "_hf_efficient_capacity"  # attribute of a cache: tokens of one request that its pages can hold
_UNLIMITED = 1 << 40  # tokens


def register(manager: type, scheduler: type) -> None:
    """Adds the checks to transformers' manager and its base class of schedulers. Idempotent."""
    if not hasattr(manager.add_request, "_hf_efficient"):
        manager.add_request = _checked(manager.add_request)
        scheduler.add_waiting_request = _within_capacity(scheduler.add_waiting_request)


def limit(cache) -> None:
    """Has requests checked against what all pages of `cache` together can hold."""
    setattr(cache, _CAPACITY, _capacity(cache))


def _checked(original):
    """transformers' `add_request`, in which a request that cannot be run raises: it would end the loop, and with it all
    other requests. Only for models whose attention is ours."""

    @functools.wraps(original)
    def add_request(self, input_ids, *args, **kwargs):
        if request_options.is_ours(self.model):
            _check_request(input_ids, self.model.get_input_embeddings().num_embeddings, kwargs.get("max_new_tokens"))
            kwargs = request_options.checked(self, **kwargs)
        return original(self, input_ids, *args, **kwargs)

    add_request._hf_efficient = True
    return add_request


def _check_request(input_ids, vocabulary: int, max_new_tokens) -> None:
    """Raises ValueError for what is no list of tokens below `vocabulary`, or an empty one."""
    if not len(input_ids):
        raise ValueError("input_ids is empty: a request needs at least one token")
    for token in input_ids:
        if not hasattr(token, "__index__") or not 0 <= operator.index(token) < vocabulary:
            raise ValueError(f"input_ids holds {token!r}: a token is an integer from 0 to {vocabulary - 1}")
    if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
        raise ValueError(f"max_new_tokens={max_new_tokens!r} is not supported: it must be an integer of at least 1")


def _within_capacity(original):
    """transformers' `add_waiting_request`, for caches that know what they hold (see `limit`): a prompt that all pages
    together could not hold fails, and what is asked for after another ends where the pages do. Both would end the loop.
    """

    @functools.wraps(original)
    def add_waiting_request(self, state):
        holds, prompt = getattr(self.cache, _CAPACITY, None), len(state.initial_tokens)
        if holds is not None:
            if prompt > holds:
                raise ValueError(
                    f"a prompt of {prompt} tokens does not fit: all pages together hold {holds}; allowed are fewer "
                    "tokens, or more pages (num_blocks, max_memory_percent)"
                )
            fits = holds + 1 - prompt  # the last new token is not stored
            if state.max_new_tokens is not None and state.max_new_tokens > fits:
                logger.warning(f"{state.request_id}: {fits} of {state.max_new_tokens} new tokens fit into all pages")
            state._new_tokens_limit = min(state._new_tokens_limit, fits)
        return original(self, state)

    return add_waiting_request


def _capacity(cache) -> int:
    """Tokens of one request that all pages of `cache` can hold."""

    def fits(tokens: int) -> bool:
        allocators = cache.cache_allocators.values()
        held = [a.most_held(tokens) if hasattr(a, "most_held") else tokens for a in allocators]
        blocks = ((a.needs_new_blocks("", 0, most), a.blocks_per_sector) for a, most in zip(allocators, held))
        return sum(-(-needed // a_sector) for needed, a_sector in blocks) <= cache.pool.num_sectors

    least, beyond = 0, 1
    while fits(beyond) and beyond < _UNLIMITED:  # sliding windows alone hold any number
        least, beyond = beyond, 2 * beyond
    while least + 1 < beyond:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if fits(middle) else (least, middle)
    return least
