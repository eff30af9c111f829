"""Requests that are cancelled, or that make no sense, leave nothing in the pool, and the others get their tokens."""

import contextlib
import gc
import random
import time

import psutil
import pytest
import torch
from helpers import tiny_model
from test_batched_step import manager_of, one_by_one, pytestmark  # noqa: F401
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState


REQUESTS, FIRST = 2000, 500
MOST_GROWTH = 20  # MB of 1,500 requests: a tenth of it was measured


@pytest.fixture
def model():
    return tiny_model("llama")


def in_use(manager) -> int:
    """Blocks that a request holds."""
    allocators = manager.batch_processor.cache.cache_allocators.values()
    return sum(len(table) for allocator in allocators for table in allocator.block_table.values())


def answers_of_all(manager) -> dict[str, list[int]]:
    """The tokens of each request that was finished, when nothing waits or runs any more. All have been added."""
    found = {}
    while not (manager.input_queue.empty() and manager.cancel_queue.empty()) or (
        manager.batch_processor.has_pending_requests() or not manager.output_router.output_queue.empty()
    ):
        result = manager.get_result(timeout=0.2)
        if result is not None and result.is_finished():
            assert result.error is None
            found[result.request_id] = result.generated_tokens
    return found


def alive() -> int:
    """Requests and answers of this process that something still refers to."""
    gc.collect()
    return sum(type(each) in (RequestState, GenerationOutput) for each in gc.get_objects())


def megabytes() -> float:
    """Of this process, resident."""
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def test_cancelled_requests_free_their_pages(model):
    """Nor do they leave anything else: after the first 500, the others take no more memory."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 128) for _ in range(draw.randint(1, 12))] for _ in range(REQUESTS)]
    kept = {index for index in range(0, REQUESTS, 100)}
    expected = one_by_one(model, [prompts[index] for index in sorted(kept)], new_tokens=6)
    before = alive()
    manager = manager_of(model, max_batch_tokens=96, num_blocks=256)
    manager.start()
    try:
        names, answers, resident = [], {}, []
        first = manager.add_request([9, 9], max_new_tokens=1)
        assert manager.get_result(first, timeout=60).is_finished()
        for index, prompt in enumerate(prompts):
            names.append(manager.add_request(prompt, max_new_tokens=6, streaming=index % 3 == 0))
            if draw.random() < 0.5:  # one that may wait, run or be done, or one that does not exist
                victim = draw.randrange(max(0, index - 40), index + 2)
                if victim not in kept:
                    manager.cancel_request(names[victim] if victim <= index else "nobody")
            if index + 1 in (FIRST, REQUESTS):
                answers |= answers_of_all(manager)
                resident.append(megabytes())
        assert [answers[names[index]] for index in sorted(kept)] == expected
        assert len(answers) < REQUESTS and in_use(manager) == 0
        assert resident[1] - resident[0] < MOST_GROWTH
        assert alive() - before <= 96  # those of the last batch may be
    finally:
        manager.stop(block=True)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "input_ids is empty"),
        ([5, 500, 7], {}, "input_ids holds 500: a token is an integer from 0 to 127"),
        ([-3], {}, "input_ids holds -3"),
        ([5, "six"], {}, "input_ids holds 'six'"),
        (torch.tensor([[5, 6]]), {}, r"input_ids holds tensor\(\[5, 6\]\): a token is an integer"),
        ([5], dict(max_new_tokens=-2), "max_new_tokens=-2 is not supported"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(model, prompt, options, message):
    """In transformers it ends the loop, and every request with it. Other attention stays as it is."""
    manager = manager_of(model)
    with pytest.raises(ValueError, match=message):
        manager.add_request(prompt, **options)
    with pytest.raises(ValueError, match="input_ids=None: must be a list of tokens"):
        manager.add_request(None)
    model.set_attn_implementation("sdpa")
    assert manager.add_request(prompt, **options)


def test_unknown_options_of_a_request_fail_alone(model):
    """The next request is answered."""
    expected = one_by_one(model, [[5, 6, 7]], new_tokens=4)
    manager = manager_of(model)
    manager.start()
    try:
        bad = manager.add_request([5, 6], max_new_tokens=3, frequency="often")
        assert "frequency" in manager.get_result(bad, timeout=60).error
        good = manager.add_request([5, 6, 7], max_new_tokens=4)
        assert manager.get_result(good, timeout=60).generated_tokens == expected[0]
        assert in_use(manager) == 0
    finally:
        manager.stop(block=True)


def answer_of(manager, name):
    """The result of a request; those of others come first."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (answer := manager.get_result(name, timeout=1)) is not None:
            return answer
    pytest.fail(f"no answer to {name}")


def test_what_all_pages_cannot_hold(model):
    """A prompt of one token too many fails alone, and an answer ends where the pages do: more tokens than asked for are
    never generated, and the last one is not stored."""
    manager = manager_of(model, num_blocks=4)
    manager.start()
    try:
        assert answer_of(manager, manager.add_request([5], max_new_tokens=1)).is_finished()
        cache = manager.batch_processor.cache
        holds = cache.num_blocks * next(iter(cache.cache_allocators.values())).tokens_per_page
        message = f"a prompt of {holds + 1} tokens does not fit: all pages together hold {holds}"
        with pytest.raises(ValueError, match=message):
            manager.add_request([5] * (holds + 1), max_new_tokens=1)
        for length, new, expected in ((holds, 9, 1), (holds - 3, 9, 4), (holds - 3, 3, 3)):
            answer = answer_of(manager, manager.add_request([5] * length, max_new_tokens=new))
            assert answer.error is None and len(answer.generated_tokens) == expected
    finally:
        manager.stop(block=True)


MALFORMED = (
    ([5, 6], dict(frequency="often")),
    ([], {}),
    ([7] * 100_000, {}),  # more than the pool holds
    ([5, 6], dict(temperature="warm", do_sample=True)),
    ([5, "six"], {}),
    ([5, 6], dict(max_new_tokens=-2)),
)


def test_malformed_requests_leave_no_page_in_use(model):
    """Many of them, between which one that is well formed is answered."""
    expected = one_by_one(model, [[5, 6, 7]], new_tokens=4)
    manager = manager_of(model, num_blocks=64)
    manager.start()
    try:
        for index in range(200):
            prompt, options = MALFORMED[index % len(MALFORMED)]
            with contextlib.suppress(ValueError, TypeError):  # or its result carries the error
                manager.add_request(prompt, **{"max_new_tokens": 3, **options})
            if index % 40 == 39:
                good = manager.add_request([5, 6, 7], max_new_tokens=4)
                assert answer_of(manager, good).generated_tokens == expected[0]
        assert in_use(manager) == 0
    finally:
        manager.stop(block=True)
