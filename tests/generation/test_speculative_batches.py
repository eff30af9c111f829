"""Greedy output under speculation is that of plain generation for every row of large ragged batches, with every drafter
of the table and with an oracle that is right now and then, one continuation or a tree (float32)."""

import functools

import pytest
import torch
from draft_models import drafting, fixed, perturbed
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from oracle import Oracle
from table import SPECULATION

from hf_efficient import BestOf, EagleHead, MedusaHeads, PromptLookup, Speculation, TokenRecycling, enable_speculation
from hf_efficient.generation.drafters.assistant import AssistantDrafter


NEW = 12


@functools.cache
def target_and_output(name: str, batch: int):
    """The model, the inputs (prompts of 1 to 24 tokens) and the plain greedy output, in which some rows end early."""
    inputs = left_padded_batch([1 + (7 * row) % 24 for row in range(batch)], seed=batch)
    target, options = tiny_model(name), dict(max_new_tokens=NEW, do_sample=False)
    target.generation_config.eos_token_id = int(target.generate(**inputs, **options)[batch // 2, -NEW // 2])
    return enable_speculation(target), inputs, target.generate(**inputs, **options)


def oracle(siblings: int, adaptive: bool):
    return lambda target, plain: Speculation(Oracle(plain, 0.7, 4, 128, siblings), adaptive=adaptive)


def heads(kind):
    return lambda target, plain: fixed(kind.for_model(target, 64))


def always(make):
    """The table's drafter, whether drafting pays or not."""

    def options(target, plain):
        given = make(target)
        lookup = given.get("prompt_lookup_num_tokens")
        return fixed(given["assistant_model"] if lookup is None else PromptLookup(lookup))

    return options


DRAFTING = {name: always(make) for name, make in SPECULATION.items() if name != "none"} | {
    "perturbed": lambda target, plain: perturbed(target, 0.1),
    "tree of an assistant": lambda target, plain: fixed(AssistantDrafter(perturbed(target, 0.1), tree=12)),
    "best of two": lambda target, plain: fixed(BestOf(PromptLookup(), TokenRecycling())),
    "untrained Medusa heads": heads(MedusaHeads),
    "untrained EAGLE head": heads(EagleHead),
    "oracle": oracle(1, adaptive=False),
    "oracle, a tree": oracle(3, adaptive=False),
    "oracle, a tree, adaptive": oracle(3, adaptive=True),
}


CASES = (
    [(name, 32, "flash_paged") for name in TINY_MODELS]
    + [(name, 32, "eager") for name in ("mistral", "gpt2")]
    + [(name, 8, "sdpa") for name in ("llama", "mistral", "gpt2")]
)  # the first has every drafter, the others every third, in turn


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_sequence_of_a_ragged_batch(case):
    name, batch, attention = case
    target, inputs, plain = target_and_output(name, batch)
    drafting(target).set_attn_implementation(attention)
    ended = (plain[:, -NEW:] == target.generation_config.eos_token_id).any(1).sum()
    assert 0 < ended < batch, "rows leave the batch"
    number = CASES.index(case)
    for drafter, make in list(DRAFTING.items())[slice(number % 3, None, 3) if number else slice(None)]:
        options = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        output = target.generate(**inputs, **options, assistant_model=make(target, plain))
        different = [row for row in range(batch) if not torch.equal(output.sequences[row], plain[row])]
        assert not different, (drafter, different)
        assert output.drafted_tokens.sum() > 0 or drafter == "oracle, a tree, adaptive", drafter
