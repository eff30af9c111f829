"""Prompts of unequal length on a CPU: run in groups of about equal length, without their padding."""

import pytest
import torch
from helpers import TINY_MODELS, assert_close, left_padded_batch, tiny_model
from native_loop import CAPTURES, transformers_loop

from hf_efficient import PagedCache, Speculation, enable_speculation, speculative_generate
from hf_efficient.generation import prompt_reading
from hf_efficient.generation.training.text import Recorder


pytestmark = pytest.mark.native_loop
LENGTHS = (23, 4, 40, 6, 21, 38)


def noting_prefills(model, monkeypatch) -> list[tuple[int, int]]:
    shapes, prefill = [], type(model)._prefill

    def noted(self, input_ids, *args, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return prefill(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "_prefill", noted)
    return shapes


@CAPTURES
@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_are_those_of_one_forward(name, monkeypatch):
    model, batch = enable_speculation(tiny_model(name)), left_padded_batch(LENGTHS)
    model.set_attn_implementation("flash_paged")
    options = dict(do_sample=False, max_new_tokens=12, pad_token_id=0)
    with transformers_loop():
        expected = model.generate(**batch, **options)
    monkeypatch.setattr(prompt_reading, "GROUP_TOKENS", 41)
    shapes = noting_prefills(model, monkeypatch)
    for lookup in (None, 4):
        assert torch.equal(model.generate(**batch, **options, prompt_lookup_num_tokens=lookup), expected)
    apart = [(2, 40), (2, 23), (2, 6)]
    drops_tokens = name in ("mistral", "gemma2", "gemma3", "gpt_oss")  # behind the window of some layers
    assert shapes == 2 * ([(6, 40)] if drops_tokens else apart)


@pytest.mark.parametrize(("lengths", "hole"), [((40, 39, 40, 38), False), (LENGTHS, True)])
def test_little_padding_and_masks_with_holes_are_run_at_once(lengths, hole, monkeypatch):
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch(lengths)
    model.set_attn_implementation("flash_paged")
    if hole:
        batch["attention_mask"][:, 36] = 0
    monkeypatch.setattr(prompt_reading, "GROUP_TOKENS", 41)
    shapes = noting_prefills(model, monkeypatch)
    model.generate(**batch, max_new_tokens=4)
    assert shapes == [(len(lengths), 40)]


def test_hidden_states_stand_where_the_prompts_do(monkeypatch):
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch(LENGTHS)
    model.set_attn_implementation("flash_paged")
    states = []
    for together in (10**9, 41):
        monkeypatch.setattr(prompt_reading, "GROUP_TOKENS", together)
        recorder = Recorder((0,))
        options = dict(custom_generate=speculative_generate, draft_model=Speculation(recorder, adaptive=False))
        model.generate(**batch, **options, max_new_tokens=5, eos_token_id=None)
        states.append(recorder.states)
    for row, length in enumerate(LENGTHS):
        whole, apart = (torch.cat(each[row])[40 - length :] for each in states)
        assert whole.shape == (length + 4, 128)
        assert_close(apart, whole, 1e-5, 1e-4, "float32 sums in another order")


def test_sequences_filled_one_after_another_are_those_filled_together():
    model, batch = tiny_model("llama"), left_padded_batch((5, 11, 8))
    model.set_attn_implementation("flash_paged")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together, apart = (PagedCache(model.config, num_blocks=12) for _ in range(2))
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=together)
        for rows, width in (([2], 8), ([1, 0], 11)):
            with apart.only(rows, 3):
                own = dict(attention_mask=mask[rows, -width:], position_ids=positions[rows, -width:])
                model(ids[rows, -width:], **own, past_key_values=apart)
            assert apart.cache_seqlens == ([0, 0, 8] if rows == [2] else [5, 11, 8])
        together.rewind([5, 11, 8])
        for width in (1, 3):
            new, at = ids[:, :width], torch.tensor([[5], [11], [8]]) + torch.arange(width)
            logits = [model(new, position_ids=at, past_key_values=cache).logits for cache in (together, apart)]
            assert_close(logits[1], logits[0], 1e-5, 1e-4, "float32 sums in another order")
            for cache in (together, apart):
                cache.rewind([5, 11, 8])


@pytest.mark.parametrize(
    ("cache", "rows", "message"),
    [
        ({}, [0], "needs PagedCache.num_blocks"),
        ({"num_blocks": 12}, [0, 0], "needs different empty rows"),
        ({"num_blocks": 12}, [3], "needs different empty rows"),
        ({"num_blocks": 12}, [1], "the rows hold .0, 4, 0. tokens"),
    ],
)
def test_sequences_that_cannot_be_filled_apart(cache, rows, message):
    model = tiny_model("llama", attn_implementation="flash_paged")
    cache = PagedCache(model.config, **cache)
    if rows == [1]:
        with torch.no_grad(), cache.only([1], 3):
            model(torch.tensor([[5, 6, 7, 8]]), past_key_values=cache)
    with pytest.raises(ValueError, match=message), cache.only(rows, 3):
        pass
