"""Many threads use one model at once, and get what one thread gets alone."""

import random
import threading

import pytest
import torch
from helpers import tiny_model
from native_loop import NATIVE_LOOP
from transformers import TextIteratorStreamer

from hf_efficient import PagedCache, enable_speculation


pytestmark = NATIVE_LOOP
THREADS, CALLS = 8, 99


class Tokens:
    """Stands for a tokenizer."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids if isinstance(ids, list) else ids.tolist()))


def make_calls() -> list[tuple[str, dict]]:
    generator, calls = torch.Generator().manual_seed(0), []
    kinds = ["greedy", "batch", "beams", "forward", "lookup", "paged", "streamer", "scores", "hidden"]
    for number in range(CALLS):
        rows = 3 if kinds[number % len(kinds)] == "batch" else 1
        ids = torch.randint(3, 128, (rows, 4 + number % 9), generator=generator)
        calls.append((kinds[number % len(kinds)], dict(input_ids=ids, max_new_tokens=3 + number % 11)))
    return calls


def answer(model, kind: str, options: dict):
    options = dict(options, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(options["input_ids"]))
    if kind == "forward":
        with torch.no_grad():
            return model(options["input_ids"]).logits.argmax(-1)
    if kind == "beams":
        options["num_beams"] = 2
    elif kind == "lookup":
        options["prompt_lookup_num_tokens"] = 3
    elif kind == "paged":
        options["past_key_values"] = PagedCache(model.config)
    elif kind == "scores":
        options.update(return_dict_in_generate=True, output_scores=True)
        return model.generate(**options).sequences
    elif kind == "hidden":
        options.update(return_dict_in_generate=True, output_hidden_states=True)
        return model.generate(**options).sequences
    elif kind == "streamer":
        streamer = TextIteratorStreamer(Tokens(), skip_prompt=True)
        output = model.generate(**options, streamer=streamer)
        "".join(streamer)
        return output
    return model.generate(**options)


@pytest.fixture(scope="module")
def calls_and_answers():
    """(calls, what one thread gets for each)."""
    model, calls = enable_speculation(tiny_model("llama", eos_token_id=None)), make_calls()
    assert len({kind for kind, _ in calls}) == 9
    return calls, [answer(model, *call) for call in calls]


@pytest.mark.parametrize("shares_config", [False, True])
def test_mixed_calls(shares_config, calls_and_answers):
    """All threads on one model, or half of them on another one that has the same config object. No forward was captured
    before."""
    models = [enable_speculation(tiny_model("llama", eos_token_id=None))] * 2
    if shares_config:
        other = type(models[0]).__mro__[2](models[0].config).eval()
        other.load_state_dict(models[0].state_dict())
        models = [models[0], other]
    calls, expected = calls_and_answers
    # the second model of the pair has no loop of ours: lookup works on one row there as well
    given, errors = [None] * CALLS, []

    def work(thread: int):
        order = list(range(thread, CALLS, THREADS))
        random.Random(thread).shuffle(order)
        for index in order:
            try:
                given[index] = answer(models[thread % 2], *calls[index])
            except Exception as error:
                errors.append((calls[index][0], repr(error)))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    wrong = [calls[i][0] for i, (a, b) in enumerate(zip(given, expected)) if not torch.equal(a, b)]
    assert not wrong
    assert models[0].config._attn_implementation == "sdpa"
