"""`pipeline("text-generation", ..., batch_size=8)` gives the same text with every way to draft, in fewer forwards."""

import draft_models
import pytest
import torch
from draft_models import character_tokenizer, counting, drafting, fixed
from helpers import tiny_model
from transformers import pipeline


PROMPTS = [
    "To be", "or not to be, that is the question:", "Whether", "'tis nobler in the mind to suffer", "The slings", "and",
    "arrows of outrageous fortune,", "Or to take arms against a sea of troubles", "And by opposing", "end them.",
    "To die",
]  # fmt: skip
OPTIONS = dict(max_new_tokens=12, do_sample=False, batch_size=8)
llama = pytest.fixture(draft_models.llama)


def texts(pipe, **options) -> list[str]:
    return [answer["generated_text"] for (answer,) in pipe(PROMPTS, **OPTIONS, **options)]


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_batches_of_ragged_prompts(attention, llama, monkeypatch):
    target, draft, _, _ = llama
    tokenizer = character_tokenizer()
    expected = texts(pipeline("text-generation", model=tiny_model("llama"), tokenizer=tokenizer))
    assert [text[: len(prompt)] for text, prompt in zip(expected, PROMPTS)] == PROMPTS

    target.set_attn_implementation(attention)
    shapes = counting(target, monkeypatch)
    with_draft = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    assert texts(with_draft) == expected
    assert {8, 3} <= {rows for rows, _ in shapes}, "prompts go in batches of 8 and of the 3 that are left"
    assert len(shapes) < 2 * OPTIONS["max_new_tokens"]

    alone = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert texts(alone) == expected
    assert texts(alone, prompt_lookup_num_tokens=3) == expected
    shapes.clear()
    assert texts(alone, assistant_model=fixed(drafting(tiny_model("llama")))) == expected
    apart = (1, 3) in shapes  # "and" needs no padding then
    assert len(shapes) == 2 * 4 + apart, "two batches: the prompts, 5 tokens, 5 tokens, the last"


def test_sampled_text_is_reproducible(llama):
    target, draft, _, _ = llama
    pipe = pipeline("text-generation", model=target, tokenizer=character_tokenizer(), assistant_model=draft)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(pipe(PROMPTS, max_new_tokens=12, do_sample=True, batch_size=8))
    assert runs[0] == runs[1] != runs[2]
