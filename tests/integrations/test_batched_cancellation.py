"""Requests that are cancelled, or that make no sense, leave nothing in the pool, and the others get their tokens."""

import random

import pytest
from helpers import tiny_model
from test_batched_step import manager_of, one_by_one, pytestmark  # noqa: F401


REQUESTS = 2000


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


def test_cancelled_requests_free_their_pages(model):
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 128) for _ in range(draw.randint(1, 12))] for _ in range(REQUESTS)]
    kept = {index for index in range(0, REQUESTS, 100)}
    expected = one_by_one(model, [prompts[index] for index in sorted(kept)], new_tokens=6)
    manager = manager_of(model, max_batch_tokens=96, num_blocks=256)
    manager.start()
    try:
        names, first = [], manager.add_request([9, 9], max_new_tokens=1)
        assert manager.get_result(first, timeout=60).is_finished()
        for index, prompt in enumerate(prompts):
            names.append(manager.add_request(prompt, max_new_tokens=6, streaming=index % 3 == 0))
            if draw.random() < 0.5:  # one that may wait, run or be done, or one that does not exist
                victim = draw.randrange(max(0, index - 40), index + 2)
                if victim not in kept:
                    manager.cancel_request(names[victim] if victim <= index else "nobody")
        answers = answers_of_all(manager)
        assert [answers[names[index]] for index in sorted(kept)] == expected
        assert len(answers) < REQUESTS and in_use(manager) == 0
    finally:
        manager.stop(block=True)


@pytest.mark.parametrize("prompt", [[5, 500, 7], [-3]])
def test_tokens_that_do_not_exist_fail_with_an_error(model, prompt):
    """As in transformers, an index out of range ends the loop: every request that waits is told so."""
    manager = manager_of(model)
    manager.start()
    try:
        bad = manager.add_request(prompt, max_new_tokens=3)
        result = manager.get_result(bad, timeout=60)
        assert result.error and "index out of range" in result.error
        assert in_use(manager) == 0
    finally:
        manager.stop(block=True)


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
