"""What surrounds a call of `generate()`: autocast, other threads, a cache of an earlier call, drafters set by hand."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread, main_thread

import pytest
import torch
from draft_models import fixed
from helpers import left_padded_batch, tiny_model
from native_loop import CAPTURES, transformers_loop
from transformers import masking_utils

from hf_efficient import BestOf, DraftHeads, MedusaHeads, PagedCache, PromptLookup, TokenRecycling, enable_speculation
from hf_efficient.generation.drafters.eagle import EagleHead
from hf_efficient.integrations.transformers_masks import one_sequence_a_row


OPTIONS = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


@CAPTURES
@pytest.mark.native_loop
@pytest.mark.parametrize("extra", [{}, {"prompt_lookup_num_tokens": 3}], ids=["loop", "drafts"])
def test_weights_written_through_data_under_autocast(extra):
    """torch keeps cast weights until the context ends; no capture of one call may read them in another."""
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch((5, 7))

    def generate(**extra):
        with torch.autocast("cpu", torch.bfloat16):
            return model.generate(**batch, **OPTIONS, **extra)

    for _ in range(2):
        before = generate(**extra)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(3)
    with transformers_loop():
        expected = generate()
    assert torch.equal(generate(**extra), expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("kind", [EagleHead, MedusaHeads])
def test_a_forward_of_another_thread_while_heads_read_hidden_states(kind):
    """Of another batch: its hidden states are none of the call's."""
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch()
    heads, others = fixed(kind.for_model(model, draft_tokens=64)), []

    def in_another_thread(*_):
        if current_thread() is main_thread():  # the other forward comes here, too
            other = Thread(target=model, args=(torch.tensor([[5, 6]]),))
            other.start()
            other.join()
            others.append(other)

    expected = model.generate(**batch, **OPTIONS)
    model.model.layers[1].register_forward_hook(in_another_thread)
    assert torch.equal(model.generate(**batch, **OPTIONS, assistant_model=heads), expected)
    assert len(others) > 2


def test_rows_of_one_sequence_in_threads_that_overlap():
    """One leaves while the other is still inside, and afterwards transformers' own function is back."""
    own, packed = masking_utils.find_packed_sequence_indices, torch.tensor([[0, 1, 0, 1]])
    mine, others = one_sequence_a_row(), one_sequence_a_row()

    def found():
        return masking_utils.find_packed_sequence_indices(packed)

    with ThreadPoolExecutor(1) as thread:
        mine.__enter__()
        thread.submit(others.__enter__).result()
        assert found() is None
        mine.__exit__(None, None, None)
        assert found() is not None and thread.submit(found).result() is None
        thread.submit(others.__exit__, None, None, None).result()
    assert masking_utils.find_packed_sequence_indices is own


@pytest.mark.parametrize("kind", ["EAGLE", "Medusa", "recycling", "lookup", "best of"])
def test_max_tokens_set_by_hand(kind, tmp_path):
    """Fewer than heads were made for is what they guess; another value is refused, and files do not depend on it."""
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch((5, 7))
    made = {"EAGLE": lambda: EagleHead.for_model(model, 64), "Medusa": lambda: MedusaHeads.for_model(model, 64)}
    drafter = made.get(kind, TokenRecycling if kind == "recycling" else PromptLookup)()
    whole = BestOf(TokenRecycling(), drafter) if kind == "best of" else drafter
    expected = model.generate(**batch, **OPTIONS)
    for value in (0, -3, 2.5, "4", None, True, *((100,) if kind in ("EAGLE", "Medusa", "recycling") else ())):
        before, drafter.max_tokens = drafter.max_tokens, value
        with pytest.raises(ValueError, match=f"max_tokens={value!r} of {type(drafter).__name__}: must be an integer"):
            model.generate(**batch, **OPTIONS, assistant_model=fixed(whole))
        drafter.max_tokens = before
    drafter.max_tokens = 2
    output = model.generate(**batch, **OPTIONS, assistant_model=fixed(whole), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    if isinstance(drafter, DraftHeads):
        assert len(output.acceptance_by_position) == 2
        drafter.save_pretrained(tmp_path)
        assert DraftHeads.from_pretrained(tmp_path).max_tokens == before


@pytest.mark.parametrize("kind", [EagleHead, MedusaHeads])
def test_measured_numbers_set_by_hand(kind, tmp_path):
    """Of the wrong length, range or type they are refused, in a call and in a file; others change drafts alone."""
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch((5, 7))
    heads = kind.for_model(model, 64)
    depth, expected = heads.max_tokens, model.generate(**batch, **OPTIONS)
    numbers = ([1.0], [1.0] * (depth + 1), [0.0] * depth, [float("nan")] * depth, [True] * depth, 2.0, None)
    shares = ([[0.5]], [[]] * depth, [[1.5]] * depth, [[0.01] * 65] * depth, [0.5] * depth, None)
    for name, values in (("temperatures", numbers), ("accuracies", shares)):
        own = getattr(heads, name)
        for value in values:
            setattr(heads, name, value)
            with pytest.raises(ValueError, match=f"{kind.__name__}: {name}=.* must be {depth} "):
                model.generate(**batch, **OPTIONS, assistant_model=fixed(heads))
            with pytest.raises(ValueError, match=f"{kind.__name__}: {name}=.* must be {depth} "):
                heads.save_pretrained(tmp_path)
        setattr(heads, name, own)
    heads.temperatures, heads.accuracies = [2] * depth, [[0.5] * 64] * depth
    assert torch.equal(model.generate(**batch, **OPTIONS, assistant_model=fixed(heads)), expected)


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_a_cache_whose_sequences_ended_apart_is_not_continued(attention):
    """With drafts or without, with beams, and by a model as transformers made it: `generate()` takes the next tokens
    for the same column of all."""
    model, batch = enable_speculation(tiny_model("llama")), left_padded_batch((5, 7))
    model.set_attn_implementation(attention)
    end, cache = model.generate(**batch, **OPTIONS)[0, 9].item(), PagedCache(model.config)
    options = {**OPTIONS, "eos_token_id": end}
    text = model.generate(**batch, **options, prompt_lookup_num_tokens=3, past_key_values=cache)
    assert len(set(cache.cache_seqlens)) == 2
    mask = torch.ones_like(text)
    mask[:, :7] = batch["attention_mask"]
    mask[0, 10:] = 0
    for extra in ({}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="past_key_values holds rows of .* end at the same column"):
            model.generate(text, attention_mask=mask, **OPTIONS, past_key_values=cache, **extra)
    stock = tiny_model("llama", attn_implementation=attention)
    cache.state.config = stock.config
    for beams in (1, 2):
        cache.batch_repeat_interleave(beams)
        with pytest.raises(ValueError, match="past_key_values holds rows of .* end at the same column"):
            stock.generate(text, attention_mask=mask, **OPTIONS, past_key_values=cache, num_beams=beams)
