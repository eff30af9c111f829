"""A model that is changed, and a random generator that is seeded, while a manager of continuous batching runs."""

import pytest
import torch
from helpers import tiny_model
from test_batched_step import PROMPTS, manager_of, one_by_one, pytestmark  # noqa: F401
from test_request_options import manager_with


LONG = 3000  # tokens: far more than come before the change


def error_of(model, change, **config):
    """Why a request ends during which `change(model)` is called."""
    manager = manager_with(model, num_blocks=1024, **config)
    manager.start()
    try:
        manager.add_request(PROMPTS[0], max_new_tokens=LONG, streaming=True)
        assert len(manager.get_result(timeout=60).generated_tokens) == 1
        change(model)
        while not (output := manager.get_result(timeout=60)).is_finished():
            pass
    finally:
        manager.stop(block=True)
    return output.error


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_attention_that_does_not_read_the_pages_ends_requests(attention):
    """It attended to the new token alone, and its tokens were delivered."""
    model = tiny_model("llama")
    error = error_of(model, lambda model: model.set_attn_implementation(attention))
    assert error.startswith(f"attn_implementation became '{attention}' while continuous batching ran")


@pytest.mark.parametrize("config", [{}, dict(kv_format="int4", page_size=16)])
def test_a_cast_model_ends_requests_by_name(config):
    """A KeyError named a dtype and nothing else."""
    error = error_of(tiny_model("llama"), lambda model: model.to(torch.bfloat16), **config)
    assert "has keys of torch.bfloat16, and the pages hold torch.float32: stop the manager" in error


def test_attention_may_change_while_nothing_runs():
    model = tiny_model("llama")
    manager = manager_of(model)
    manager.start()
    try:
        for _ in range(2):
            expected = one_by_one(model, PROMPTS[:1], new_tokens=5)
            model.set_attn_implementation("flash_paged")
            manager.add_request(PROMPTS[0], max_new_tokens=5)
            assert manager.get_result(timeout=60).generated_tokens == expected[0]
    finally:
        manager.stop(block=True)


def test_a_seed_gives_the_same_tokens_right_after_a_start():
    """The start drew a seed of its own from the generator that had been seeded."""
    model = tiny_model("llama")
    options = dict(max_new_tokens=12, do_sample=True, temperature=1.5, top_k=50)
    torch.manual_seed(11)
    row = model.generate(torch.tensor(PROMPTS[:1]), **options, pad_token_id=0)[0]
    found = []
    manager = manager_with(model)
    torch.manual_seed(11)
    manager.start()
    try:
        for _ in range(2):
            manager.add_request(PROMPTS[0], **options)
            found.append(manager.get_result(timeout=60).generated_tokens)
            torch.manual_seed(11)
    finally:
        manager.stop(block=True)
    assert found == [row[len(PROMPTS[0]) :].tolist()] * 2
