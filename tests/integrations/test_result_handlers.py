"""Handlers of results of continuous batching: what goes wrong with that of one request keeps no other from its own."""

import asyncio
import threading

import pytest
from helpers import tiny_model
from test_batched_cancellation import in_use
from test_batched_step import PROMPTS, manager_of, one_by_one, pytestmark  # noqa: F401


NEW_TOKENS = 30


@pytest.fixture
def manager():
    manager = manager_of(tiny_model("llama"), num_blocks=1024)
    manager.start()
    yield manager
    manager.stop(block=True)


async def handled(manager, name, prompt) -> tuple[list[int], bool]:
    """The tokens of a request, from its handler, and whether this was always called in its own thread."""
    own, done, calls = threading.get_ident(), asyncio.get_running_loop().create_future(), []

    def handle(output):
        calls.append(threading.get_ident() == own)
        if output.is_finished():
            done.set_result(output.generated_tokens)

    manager.register_result_handler(name, handle)
    manager.add_request(prompt, name, max_new_tokens=NEW_TOKENS, streaming=True)
    return await asyncio.wait_for(done, 60), all(calls) and len(calls) == NEW_TOKENS


def test_a_handler_whose_event_loop_is_closed(manager):
    """Its request is cancelled. The loop of all requests ended with it."""
    expected = one_by_one(tiny_model("llama"), PROMPTS[:1], NEW_TOKENS)

    async def leave():
        manager.register_result_handler("left", print)
        manager.add_request(PROMPTS[1], "left", max_new_tokens=3000, streaming=True)

    asyncio.run(leave())
    tokens, _ = asyncio.run(handled(manager, "other", PROMPTS[0]))
    assert tokens == expected[0] and in_use(manager) == 0
    assert manager.output_router.result_handlers == {}


def test_a_handler_that_raises(manager):
    """It kept the results of the same step from all handlers after it."""
    raised = []

    async def ask():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["message"]))
        manager.register_result_handler("bad", lambda output: 1 / 0)
        manager.add_request(PROMPTS[1], "bad", max_new_tokens=NEW_TOKENS, streaming=True)
        return await handled(manager, "good", PROMPTS[0])

    tokens, is_own = asyncio.run(ask())
    assert tokens == one_by_one(tiny_model("llama"), PROMPTS[:1], NEW_TOKENS)[0] and is_own
    assert "the result handler of request bad raised ZeroDivisionError" in raised[0]


def test_handlers_of_several_event_loops(manager):
    """Those of all requests of a step were called in the loop of one of them."""
    expected, found = one_by_one(tiny_model("llama"), new_tokens=NEW_TOKENS), {}

    def run(number):
        found[number] = asyncio.run(handled(manager, f"r{number}", PROMPTS[number]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(PROMPTS))] == [(tokens, True) for tokens in expected]
