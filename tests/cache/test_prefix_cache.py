"""PrefixCache: the output of generate() without it, and what it skips.

A cut prompt runs as a shorter forward, whose sums are rounded in another order: so "the same" is identical tokens, and
logits within 1e-5 of their size in float32.
"""

import copy

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from prefix_models import SIZE, forward, generate, new_prefix, prompts, skipped

from hf_efficient import PagedCache, enable_speculation


GENERATIONS = {
    "greedy": {},
    "beams": dict(num_beams=3, num_return_sequences=2),
    "samples": dict(do_sample=True, num_return_sequences=2, top_k=20),
    "chunked prefill": dict(prefill_chunk_size=12),
}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_generate_is_the_same(name):
    """Left-padded batches: prompts seen before, others that begin alike, and longer ones that continue an answer."""
    model = tiny_model(name, attn_implementation="flash_paged")
    prefix = new_prefix(model, 512)
    # all ways with all tokens and with windows, and two of them in each other architecture
    other = list(GENERATIONS)[1 + list(TINY_MODELS).index(name) % 3]
    for label in GENERATIONS if name in ("llama", "gemma3") else ("greedy", other):
        kwargs = GENERATIONS[label]
        for seed in (0, 1):
            inputs = prompts(seed=seed)
            torch.manual_seed(0)
            expected = generate(model, inputs, new_tokens=10, **kwargs)
            torch.manual_seed(0)
            output, saved = skipped(prefix, lambda: generate(model, inputs, prefix, 10, **kwargs))  # noqa: B023
            assert torch.equal(output, expected), (label, seed)
            assert saved >= 3 * SIZE or (label, seed, saved) == ("greedy", 0, 0)
    stats = prefix.stats()
    assert stats["bypassed"] == 0 and stats["hits"] > 0 and stats["used_blocks"] <= stats["num_blocks"] == 512


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", "flash_paged"])
def test_logits_are_the_same(name, implementation):
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    prefix, kwargs = new_prefix(model), dict(return_dict_in_generate=True, output_logits=True)
    for lengths in ((40, 40), (33, 40, 21))[: 1 + (implementation == "flash_paged")]:
        for seed in (0, 1):
            expected = generate(model, prompts(lengths, seed=seed), **kwargs)
            output = generate(model, prompts(lengths, seed=seed), prefix, **kwargs)
            assert torch.equal(output.sequences, expected.sequences)
            for ours, theirs in zip(output.logits, expected.logits):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert prefix.stats()["skipped_tokens"] >= 2 * 16 and prefix.stats()["bypassed"] == 0


def test_rows_are_cut_where_the_first_of_them_differs(llama):
    prefix = new_prefix(llama)
    generate(llama, prompts((40,), shared=32), prefix)
    (_, saved) = skipped(prefix, lambda: generate(llama, prompts((40, 36), shared=32, seed=1), prefix))
    assert saved == 32 + 28  # 32 columns of both, of which 4 are padding
    (_, saved) = skipped(prefix, lambda: generate(llama, left_padded_batch((40, 36), seed=5), prefix))
    assert saved == 0 and (prefix.stats()["hits"], prefix.stats()["misses"]) == (2, 3)


def test_the_next_turns_of_a_chat(llama):
    """Each turn's prompt is all that was said before, so only the user's new words run."""
    prefix, history, seen = new_prefix(llama), prompts((30,))["input_ids"], 0
    for turn in range(4):
        inputs = {"input_ids": history, "attention_mask": torch.ones_like(history)}
        expected = generate(llama, inputs)
        output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix))  # noqa: B023
        assert torch.equal(output, expected)
        assert saved == seen // SIZE * SIZE
        seen = output.shape[1] - 1  # the last token was never fed
        history = torch.cat([output, left_padded_batch((9,), seed=turn)["input_ids"]], 1)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_one_cache_over_several_turns(llama, implementation):
    """A cache that is continued itself stores and restores too, also behind the end of what it holds."""
    llama.set_attn_implementation(implementation)
    prefix = new_prefix(llama)
    inputs = prompts((30, 30))
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    longer = generate(llama, inputs, cache=cache, new_tokens=20)
    short = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    generate(llama, {name: x[:, :20] for name, x in inputs.items()}, cache=short, new_tokens=1)
    assert short.cache_seqlens == [20, 20]
    again = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    expected = generate(llama, again, new_tokens=8)
    output, saved = skipped(prefix, lambda: generate(llama, again, cache=short, new_tokens=8))
    assert torch.equal(output, expected) and saved == 2 * (48 - 20)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_speculation(implementation):
    """Drafts that were rejected are forgotten; those of other sequences are not mixed up."""
    model, draft = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    model.set_attn_implementation(implementation)
    prefix = new_prefix(model)
    plain = prompts((30, 30, 30))
    one = {name: x[:1] for name, x in plain.items()}
    modes = {"lookup": dict(prompt_lookup_num_tokens=3), "draft": dict(assistant_model=draft)}
    for batch, prepare in ((one, lambda m: m), (plain, enable_speculation)):  # transformers' own takes one sequence
        expected = generate(model, batch, new_tokens=24)
        prepare(model)
        for label, kwargs in modes.items():
            for round_ in range(2):
                output, saved = skipped(prefix, lambda: generate(model, batch, prefix, 24, **kwargs))  # noqa: B023
                assert torch.equal(output, expected), label
                assert saved > 0 or (label, round_) == ("lookup", 0)
        output, saved = skipped(prefix, lambda: generate(model, batch, prefix, 24))  # noqa: B023
        assert torch.equal(output, expected) and saved > 0
    longer = {"input_ids": expected, "attention_mask": torch.ones_like(expected)}
    output, saved = skipped(prefix, lambda: generate(model, longer, prefix))
    assert torch.equal(output, generate(model, longer)) and saved >= 3 * 48


def test_rows_that_move(llama):
    """What is stored follows reordering, cropping, rewinding, repeating, copying and reset."""
    operations = {
        "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
        "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 2])),
        "repeat": lambda cache: cache.batch_repeat_interleave(2),
        "crop": lambda cache: cache.crop(-5),
        "rewind": lambda cache: cache.rewind([13, 2, 9]),
    }
    ids = left_padded_batch((20, 20, 20))["input_ids"]
    for label, operate in operations.items():
        prefix = new_prefix(llama)
        cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
        forward(llama, cache, ids)
        held = [row.tolist() for row in ids]
        operate(cache)
        rows = {"select": [2, 0], "reorder": [1, 1, 2], "repeat": [0, 0, 1, 1, 2, 2]}.get(label, [0, 1, 2])
        held = [held[row][:length] for row, length in zip(rows, cache.cache_seqlens)]
        more = left_padded_batch((16,) * len(rows), seed=3)["input_ids"]
        positions = torch.tensor(cache.cache_seqlens)[:, None] + torch.arange(16)
        forward(llama, copy.deepcopy(cache), more, position_ids=positions)
        assert prefix.stats()["used_blocks"] > 6
        for row, tail in zip(held, more.tolist()):
            inputs = {"input_ids": torch.tensor([row + tail]), "attention_mask": torch.ones(1, len(row) + 16).long()}
            expected = generate(llama, inputs, new_tokens=4)
            output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix, new_tokens=4))  # noqa: B023
            assert torch.equal(output, expected) and saved == min((len(row) + 16) // SIZE * SIZE, len(row) + 15), label
        cache.reset()
        assert torch.equal(generate(llama, prompts(), cache=cache), generate(llama, prompts()))


def test_every_logit_is_computed_when_asked_for(llama):
    prefix, ids = new_prefix(llama), prompts((40, 40))["input_ids"]

    def call(**kwargs):
        cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
        with torch.no_grad():
            return llama(ids, past_key_values=cache, **kwargs)

    expected = forward(llama, None, ids, use_cache=False)
    for kwargs in ({}, dict(output_hidden_states=True, logits_to_keep=1), dict(labels=ids, logits_to_keep=40)):
        output, saved = skipped(prefix, lambda: call(**kwargs))  # noqa: B023
        assert saved == 0 and output.logits.shape[1] == (1 if "output_hidden_states" in kwargs else 40)
        if "output_hidden_states" in kwargs:
            assert output.hidden_states[-1].shape[1] == 40
    assert prefix.stats()["bypassed"] == 6 and prefix.stats()["used_blocks"] == 2 + 2 * 3  # stored all the same
    for keep in (1, 3, 17):
        output, saved = skipped(prefix, lambda: call(logits_to_keep=keep))  # noqa: B023
        assert saved == 2 * (40 - keep)
        torch.testing.assert_close(output.logits, expected[:, -keep:], rtol=1e-5, atol=1e-4)


def foreign_forwards(model, ids):
    """Forwards whose keys do not follow from token ids at their own positions."""
    causal = torch.ones(24, 24).tril().bool()[None, None]
    width = torch.arange(24)
    return {
        "embeddings": lambda cache: forward(model, cache, None, inputs_embeds=model.get_input_embeddings()(ids)),
        "4-D mask": lambda cache: forward(model, cache, ids, attention_mask=causal & (width != 2), logits_to_keep=1),
        "packed": lambda cache: forward(model, cache, ids, position_ids=(width % 12)[None], logits_to_keep=1),
        "shifted": lambda cache: forward(model, cache, ids, position_ids=(width + 1)[None], logits_to_keep=1),
        "hidden token": lambda c: forward(model, c, ids, attention_mask=(width != 2)[None].long(), logits_to_keep=1),
    }


@pytest.mark.parametrize("name", ["embeddings", "4-D mask", "packed", "shifted", "hidden token"])
def test_other_forwards_are_neither_cut_nor_stored(llama, name):
    llama.set_attn_implementation("sdpa")
    ids = prompts((24,))["input_ids"]
    for filled in (False, True):
        prefix, alone = new_prefix(llama), PagedCache(llama.config, block_size=SIZE)
        if filled:
            generate(llama, {"input_ids": ids}, prefix, new_tokens=1)
        cache, used = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix), prefix.stats()["used_blocks"]
        run = foreign_forwards(llama, ids)[name]
        assert torch.equal(run(cache), run(alone))
        before = prefix.stats()
        assert before["skipped_tokens"] == 0 and before["bypassed"] == (0 if name == "embeddings" else 1)
        more = left_padded_batch((24,), seed=4)["input_ids"]  # nor what follows them
        assert torch.equal(forward(llama, cache, more), forward(llama, alone, more))
        first_part = SIZE if name == "packed" else 0  # as it would be alone
        assert prefix.stats()["used_blocks"] == max(used, first_part // SIZE)
