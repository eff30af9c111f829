"""PagedCache: its own operations (test_cache_equality.py has generation beside DynamicCache)."""

import copy

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import step
from transformers import DynamicCache

from hf_efficient import PagedCache
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.kernels.attention import api


def one_prompt():
    return {name: tensor[1:2] for name, tensor in left_padded_batch().items()}


def generate(model, inputs, new_tokens=24, **kwargs):
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **kwargs)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_continuing_and_copying_a_prefix(llama, implementation):
    """The second turn of a chat, and one prompt's cache copied for two continuations, with a left-padded batch."""
    llama.set_attn_implementation(implementation)
    inputs = left_padded_batch()
    cache, reference = PagedCache(llama.config, block_size=8), DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(**inputs, past_key_values=cache)
        llama(**inputs, past_key_values=reference)
    for seed in (1, 2):
        more = left_padded_batch((4, 4, 4), seed=seed)
        longer = {name: torch.cat([inputs[name], more[name]], 1) for name in inputs}
        duplicate = copy.deepcopy(cache)
        assert duplicate.state.config is llama.config
        expected = generate(llama, longer, past_key_values=copy.deepcopy(reference))
        assert torch.equal(generate(llama, longer, past_key_values=duplicate), expected)
    assert cache.get_seq_length() == reference.get_seq_length()


def test_padding_takes_no_slots_and_no_blocks(llama):
    inputs = left_padded_batch((2, 40, 9))
    cache = PagedCache(llama.config, block_size=8)
    with torch.no_grad():
        llama(**inputs, past_key_values=cache)
    assert cache.cache_seqlens == [2, 40, 9] and cache.num_used_blocks == 1 + 5 + 2
    assert cache.get_seq_length() == 40 and cache.get_mask_sizes(1, 0) == (41, 0)
    assert cache.layers[0].store.pages["keys"].shape[0] <= 3 * 5 * 2
    stored = [cache.layers[0].store.pages["keys"].flatten(0, 1)[cache.state.pool.tables[0][0] * 8 + 2 :][:6]]
    assert not stored[0].any()  # beyond the sequence's end nothing was written


def test_beams_share_the_blocks_of_their_prompt(llama):
    prompt = left_padded_batch((64,), seed=3)
    cache = PagedCache(llama.config, block_size=8)
    generate(llama, prompt, new_tokens=16, num_beams=4, past_key_values=cache)
    apart = PagedCache(llama.config, block_size=8)
    generate(llama, {name: tensor.repeat(4, 1) for name, tensor in prompt.items()}, 16, past_key_values=apart)
    assert apart.num_used_blocks == 4 * 10
    cache.reorder_cache(torch.tensor([0, 0, 0, 0]))
    assert cache.num_used_blocks <= 10
    cache.batch_repeat_interleave(3)
    assert cache.num_used_blocks <= 10 and len(cache.cache_seqlens) == 12


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_the_calls_of_the_kernels(name, monkeypatch):
    """What runs on CUDA: appending and attending in one kernel for few columns, writing first for many. The functions
    are those of the kernels, in torch."""
    monkeypatch.setattr(PageStore, "_attend_cpu", PageStore._attend_kernels)
    calls = []
    for function in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
        original = getattr(api, function)

        def spy(*args, original=original, function=function, **kwargs):
            calls.append((function, kwargs.get("block_table") is not None))
            return original(*args, **kwargs)

        monkeypatch.setattr(api, function, spy)
    model = tiny_model(name)
    padded, even = left_padded_batch((5, 30, 8)), left_padded_batch((40, 40))
    for inputs, kwargs in ((padded, {}), (padded, dict(num_beams=3)), (even, dict(prefill_chunk_size=20))):
        model.set_attn_implementation("eager")
        expected = generate(model, inputs, 10, **kwargs)
        model.set_attn_implementation("flash_paged")
        cache = PagedCache(model.config, block_size=8)
        assert torch.equal(generate(model, inputs, 10, past_key_values=cache, **kwargs), expected)
    assert set(calls) == {
        ("flash_attn_with_kvcache", True), ("flash_attn_varlen_func", False), ("flash_attn_varlen_func", True)
    }  # fmt: skip


@pytest.mark.parametrize("block_size", [8, 16])
def test_ragged_rows_under_flash_paged(llama, block_size):
    """Rows rewound to different lengths go on at their own ends, as each would alone."""
    ids = torch.randint(3, 128, (3, 20))
    cache = PagedCache(llama.config, block_size=block_size)
    step(llama, cache, ids)
    lengths = [20, 7, 16]
    cache.rewind(lengths)
    assert cache.cache_seqlens == lengths and cache.get_seq_length() == 20
    assert cache.num_used_blocks == sum(-(-length // block_size) for length in lengths)
    for width in (4, 1, 1):
        new = torch.randint(3, 128, (3, width))
        positions = torch.tensor(cache.cache_seqlens)[:, None] + torch.arange(width)
        logits = step(llama, cache, new, position_ids=positions)
        ids = [torch.cat([row[:length], more]) for row, length, more in zip(ids, cache_before(cache, width), new)]
        for row, tokens in enumerate(ids):
            alone = step(llama, None, tokens[None], use_cache=False)[0, -width:]
            torch.testing.assert_close(logits[row], alone, rtol=1e-4, atol=1e-4)
    cache.rewind([0, 3, 0])
    assert cache.num_used_blocks == 1


def cache_before(cache, width):
    return [length - width for length in cache.cache_seqlens]


def test_ragged_rows_under_other_implementations(llama):
    """update() gives each sequence from the left, zeros after it; the caller brings the 4-D mask."""
    llama.set_attn_implementation("sdpa")
    ids = torch.randint(3, 128, (2, 12))
    cache = PagedCache(llama.config, block_size=8)
    step(llama, cache, ids)
    cache.rewind([12, 5])
    new = torch.randint(3, 128, (2, 2))
    queries = torch.tensor([[12, 13], [5, 6]])
    mask = (torch.arange(14) <= queries[..., None])[:, None]
    logits = step(llama, cache, new, position_ids=queries, attention_mask=mask)
    alone = step(llama, None, torch.cat([ids[1, :5], new[1]])[None], use_cache=False)[0, -2:]
    torch.testing.assert_close(logits[1], alone, rtol=1e-4, atol=1e-4)
    key = torch.ones(2, 2, 1, 16)
    keys, values = cache.layers[0].update(key, key)
    assert keys.shape == (2, 2, 15, 16) and keys.is_contiguous()
    assert keys[0, :, 14].eq(1).all() and keys[1, :, 7].eq(1).all()
    assert not keys[1, :, 8:].any() and not values[1, :, 8:].any() and keys[1, :, :7].any(-1).all()


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_operations_equal_those_of_dynamic_cache(llama, implementation):
    """crop, reorder, select, repeat on a left-padded batch: the next logits are those of DynamicCache under eager."""
    inputs = left_padded_batch((4, 12, 7))
    operations = {
        "crop": (lambda cache: cache.crop(-3), lambda mask: mask[:, :-3]),
        "crop into the padding": (lambda cache: cache.crop(-9), lambda mask: mask[:, :-9]),
        "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), lambda mask: mask[[1, 1, 0]]),
        "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), lambda mask: mask[[2, 0]]),
        "select bool": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), lambda m: m[[0, 2]]),
        "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda mask: mask.repeat_interleave(2, 0)),
    }
    for label, (operate, on_mask) in operations.items():
        results = []
        for name, make in ((implementation, PagedCache), ("eager", lambda config: DynamicCache(config=config))):
            llama.set_attn_implementation(name)
            cache = make(llama.config)
            step(llama, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
            operate(cache)
            mask = on_mask(inputs["attention_mask"])
            torch.manual_seed(0)
            for width in (2, 1):
                mask = torch.cat([mask, mask.new_ones(mask.shape[0], width)], 1)
                positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -width:]
                tokens = torch.randint(3, 128, (mask.shape[0], width))
                logits = step(llama, cache, tokens, attention_mask=mask, position_ids=positions)
            results.append((logits, cache.get_seq_length()))
        assert results[0][1] == results[1][1], label
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4, msg=lambda m: f"{label}: {m}")  # noqa: B023


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_the_length_follows_the_rows_that_are_left(llama, implementation):
    llama.set_attn_implementation(implementation)
    ids = torch.randint(3, 128, (3, 20))
    cache = PagedCache(llama.config)
    step(llama, cache, ids)
    cache.rewind([20, 7, 7])
    cache.batch_select_indices(torch.tensor([2, 1]))
    assert cache.get_seq_length() == 7 and cache.get_mask_sizes(1, 0) == (8, 0)
    token = torch.tensor([[5], [6]])
    expected = step(llama, None, torch.cat([ids[[2, 1], :7], token], 1), use_cache=False)[:, -1:]
    torch.testing.assert_close(step(llama, cache, token), expected, rtol=1e-4, atol=1e-4)


def test_reset_and_reuse_with_another_batch(llama):
    cache = PagedCache(llama.config, num_blocks=8)
    for lengths in ((5, 11, 8), (6,)):
        inputs = left_padded_batch(lengths)
        assert torch.equal(generate(llama, inputs, 8, past_key_values=cache), generate(llama, inputs, 8))
        with pytest.raises(ValueError, match=rf"holds {len(lengths)} sequences.*batch of 5.*reset\(\)"):
            step(llama, cache, torch.ones(5, 1, dtype=torch.long))
        cache.reset()
        assert cache.cache_seqlens == [] and cache.num_used_blocks == 0 and cache.get_seq_length() == 0


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_pool_too_small_changes_nothing(llama, implementation):
    llama.set_attn_implementation(implementation)
    cache = PagedCache(llama.config, block_size=8, num_blocks=3)
    with pytest.raises(ValueError, match=r"num_blocks=3.*needs 4 blocks"):
        step(llama, cache, torch.ones(2, 10, dtype=torch.long))
    assert cache.batch_size == -1
    ids = torch.randint(3, 128, (1, 20))
    step(llama, cache, ids)
    with pytest.raises(ValueError, match=r"needs 4 blocks \(3 in use and 1 more\)"):
        step(llama, cache, torch.ones(1, 5, dtype=torch.long))
    logits = step(llama, cache, torch.ones(1, 4, dtype=torch.long))
    full = step(llama, None, torch.cat([ids, torch.ones(1, 4, dtype=torch.long)], 1), use_cache=False)
    torch.testing.assert_close(logits, full[:, -4:], rtol=1e-4, atol=1e-4)


def test_right_padding_and_holes_are_packed(llama):
    """Tokens hidden by the first mask are not stored, wherever they stand."""
    ids = torch.randint(3, 128, (2, 8))
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 0], [1] * 8])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = PagedCache(llama.config)
    logits = step(llama, cache, ids, attention_mask=mask, position_ids=positions)
    assert cache.cache_seqlens == [4, 8]
    alone = step(llama, None, ids[:1, [0, 1, 3, 4]], use_cache=False)
    torch.testing.assert_close(logits[0, 4], alone[0, -1], rtol=1e-4, atol=1e-4)


def test_switching_the_implementation_midway(llama):
    """Without padding the cache is the same for all; with padding that takes no room it is not."""
    ids = torch.randint(3, 128, (2, 9))
    cache = PagedCache(llama.config)
    for implementation, part in (("flash_paged", ids[:, :4]), ("sdpa", ids[:, 4:6]), ("flash_paged", ids[:, 6:])):
        llama.set_attn_implementation(implementation)
        logits = step(llama, cache, part)
    full = step(llama, None, ids, use_cache=False)
    torch.testing.assert_close(logits, full[:, 6:], rtol=1e-4, atol=1e-4)

    cache.reset()
    inputs = left_padded_batch((4, 9))
    step(llama, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    llama.set_attn_implementation("sdpa")
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    with pytest.raises(RuntimeError, match="stores no padding, and cannot be continued"):
        step(llama, cache, mask[:, -1:], attention_mask=mask)


def test_rows_all_freed_and_new_ones(llama):
    inputs = left_padded_batch((5, 11, 8))
    for kv_format in ("auto", "int4"):
        cache = PagedCache(llama.config, kv_format=kv_format)
        generate(llama, left_padded_batch((5, 9)), 8, past_key_values=cache)
        with pytest.raises(ValueError, match="a mask over 1 sequences, and there are 2"):
            cache.batch_select_indices(torch.tensor([True]))
        cache.batch_select_indices(torch.tensor([False, False]))
        assert cache.batch_size == -1 and cache.get_seq_length() == 0
        assert torch.equal(generate(llama, inputs, 8, past_key_values=cache), generate(llama, inputs, 8))


def test_filled_in_inference_mode_and_used_outside(llama):
    for implementation in ("flash_paged", "sdpa"):
        llama.set_attn_implementation(implementation)
        inputs = left_padded_batch((40, 40))
        cache = PagedCache(llama.config, block_size=8)
        with torch.inference_mode():
            llama(inputs["input_ids"][:, :30], past_key_values=cache)
        assert torch.equal(generate(llama, inputs, 40, past_key_values=cache), generate(llama, inputs, 40))


def test_memory_is_freed_with_the_cache(llama):
    import gc
    import weakref

    llama.set_attn_implementation("flash_paged")
    cache = PagedCache(llama.config)
    gc.disable()
    try:
        generate(llama, one_prompt(), 4, past_key_values=cache)
        pages = weakref.ref(cache.layers[0].store.pages["keys"])
        del cache
        assert pages() is None  # no cycle keeps the tensors until the next collection
    finally:
        gc.enable()
