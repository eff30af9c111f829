"""Requests that continuous batching cannot run are refused alone, where transformers would end the loop for all."""

import functools
import operator
from contextvars import ContextVar

from transformers.generation.continuous_batching.requests import RequestState
from transformers.utils import logging

from hf_efficient.integrations import transformers_request_options as request_options


logger = logging.get_logger(__name__)
_LONGEST = "_hf_efficient_longest"  # attribute of a cache: tokens that one request may store in it, and why no more
_UNLIMITED = 1 << 40  # tokens
_FAILS_ALONE: ContextVar[bool] = ContextVar("fails_alone", default=False)  # see `_failing_alone`


def register(manager: type, processor: type, scheduler: type) -> None:
    """Adds the checks to transformers' manager, its processor and its base class of schedulers. Idempotent."""
    if not hasattr(manager.add_request, "_hf_efficient"):
        manager.add_request = _checked(manager.add_request)
        manager.add_requests = _failing_alone(manager.add_requests)
        processor._handle_request_error = _of_all_answers(processor._handle_request_error)
        scheduler.add_waiting_request = _within_capacity(scheduler.add_waiting_request)


def limit(cache, model) -> None:
    """Has requests checked against what all pages of `cache` together can hold, and `model` can read."""
    from hf_efficient.generation.model_traits import exact_length, learned_positions  # imports much

    limits = [(_capacity(cache), "all pages together hold {}; more pages (num_blocks, max_memory_percent) hold more")]
    if (positions := learned_positions(model)) is not None:
        limits.append((positions, "the model has learned {} positions"))
    if (exact := exact_length(model)) is not None:  # one longer request would change the tokens of all others
        limits.append((exact, "beyond {} tokens the model's rotary frequencies depend on their number: use generate()"))
    longest, reason = min(limits)
    setattr(cache, _LONGEST, (longest, reason.format(longest)))


def _checked(original):
    """transformers' `add_request`, in which a request that cannot be run raises: it would end the loop, and with it all
    other requests. Only for models whose attention is ours."""

    @functools.wraps(original)
    def add_request(self, input_ids, request_id=None, *args, **kwargs):
        if not request_options.is_ours(self.model):
            return original(self, input_ids, request_id, *args, **kwargs)
        try:
            _check_request(input_ids, self.model.get_input_embeddings().num_embeddings, kwargs.get("max_new_tokens"))
            if (processor := getattr(self, "batch_processor", None)) is not None:
                _check_length(processor.cache, len(input_ids))
            if request_id is not None and request_id in _requests_of(self):
                raise ValueError(f"request_id={request_id!r} is that of a request that has not ended")
            kwargs = request_options.checked(self, **kwargs)
        except ValueError as error:
            if not _FAILS_ALONE.get():
                raise
            _fail(self, request_id, error)
            return request_id
        return original(self, input_ids, request_id, *args, **kwargs)

    add_request._hf_efficient = True
    return add_request


def _failing_alone(original):
    """transformers' `add_requests`, in which a request that cannot be run is answered by its error, as those are whose
    prompts fit no pages. It would leave `generate_batch` without any answer."""

    @functools.wraps(original)
    def add_requests(self, *args, **kwargs):
        token = _FAILS_ALONE.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _FAILS_ALONE.reset(token)

    return add_requests


def _requests_of(manager) -> set[str]:
    """The ids of those that have not ended."""
    scheduler = getattr(getattr(manager, "batch_processor", None), "scheduler", None)
    known = [] if scheduler is None else [*scheduler.active_requests, *scheduler.waiting_requests]
    return {*known, *(state.request_id for state in list(manager.input_queue.queue))}


def _fail(manager, request_id: str, error: ValueError) -> None:
    """Answers a request by `error`."""
    for name in (request_id, *_further(request_id, manager.num_return_sequences - 1)):
        manager.output_router.fail_and_deliver(RequestState(request_id=name, initial_tokens=[]), error)


def _of_all_answers(original):
    """transformers' `_handle_request_error`, for all answers that a prompt was to have: `generate_batch` waits for each
    of them."""

    @functools.wraps(original)
    def _handle_request_error(self, error, state):
        original(self, error, state)
        if request_options.is_ours(self):
            for name in _further(state.request_id, state.num_children):
                self.output_router.fail_and_deliver(RequestState(request_id=name, initial_tokens=[]), error)

    return _handle_request_error


def _further(request_id: str, answers: int) -> list[str]:
    """The ids of the answers to a prompt after the first, as transformers makes them."""
    return [f"{request_id}__child#{number}" for number in range(answers)]


def _check_request(input_ids, vocabulary: int, max_new_tokens) -> None:
    """Raises ValueError for what is no list of tokens below `vocabulary`, or an empty one."""
    if not hasattr(input_ids, "__len__"):
        raise ValueError(f"input_ids={input_ids!r}: must be a list of tokens")
    if not len(input_ids):
        raise ValueError("input_ids is empty: a request needs at least one token")
    for token in input_ids:
        try:
            is_known = 0 <= operator.index(token) < vocabulary
        except TypeError:  # also tensors of fractions or of several numbers
            is_known = False
        if not is_known:
            raise ValueError(f"input_ids holds {token!r}: a token is an integer from 0 to {vocabulary - 1}")
    if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
        raise ValueError(f"max_new_tokens={max_new_tokens!r} is not supported: it must be an integer of at least 1")


def _within_capacity(original):
    """transformers' `add_waiting_request`, for caches that know what a request may store (see `limit`): a longer prompt
    fails, and what is asked for after another ends there. Both would end the loop."""

    @functools.wraps(original)
    def add_waiting_request(self, state):
        if (fits := room(self.cache, len(state.initial_tokens))) is not None:
            if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
                raise ValueError(f"request_id={state.request_id!r} is that of a request that has not ended")
            _check_length(self.cache, len(state.initial_tokens))
            if state.max_new_tokens is not None and state.max_new_tokens > fits:
                _, reason = getattr(self.cache, _LONGEST)
                logger.warning(f"{state.request_id}: {fits} of {state.max_new_tokens} new tokens fit: {reason}")
            state._new_tokens_limit = min(state._new_tokens_limit, fits)
        return original(self, state)

    return add_waiting_request


def room(cache, prompt: int) -> int | None:
    """How many new tokens fit after a prompt of so many; None where `cache` knows no limit (see `limit`)."""
    holds, _ = getattr(cache, _LONGEST, (None, ""))
    return None if holds is None else holds + 1 - prompt  # the last one is not stored


def _check_length(cache, prompt: int) -> None:
    """Raises ValueError for a prompt of so many tokens that `cache` says are too many (see `limit`)."""
    holds, reason = getattr(cache, _LONGEST, (prompt, ""))
    if prompt > holds:
        raise ValueError(f"a prompt of {prompt} tokens does not fit: {reason}")


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
