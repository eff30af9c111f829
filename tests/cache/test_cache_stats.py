"""cache.stats() against sums over the tables and tensors, and pools sized by a budget of bytes."""

import copy

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import step

from hf_efficient import PagedCache, PrefixCache


IMPLEMENTATIONS = ("sdpa", "flash_paged")
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 8  # layers, keys and values, heads, head dim, float32, tokens of a block


def test_counts_of_a_ragged_batch(llama):
    cache = PagedCache(llama.config, block_size=8, num_blocks=20)
    empty = cache.stats()
    assert (empty.blocks_used, empty.blocks_free, empty.tokens, empty.bytes_allocated) == (0, 20, 0, 0)
    inputs = left_padded_batch((3, 17, 8))
    step(llama, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    stats = cache.stats()
    assert (stats.blocks_used, stats.blocks_free, stats.blocks_shared) == (1 + 3 + 1, 15, 0)
    assert stats.tokens == 28 and stats.wasted_slots == 5 * 8 - 28
    assert stats.bytes_allocated == 20 * BLOCK_BYTES and stats.bytes_used == 5 * BLOCK_BYTES
    assert stats.prefix_hit_rate is None
    assert str(stats) == "5 blocks used (0 shared), 15 free; 28 tokens, 12 slots wasted; 0.0 of 0.1 MiB used"
    assert copy.deepcopy(cache).stats() == stats
    cache.rewind([0, 9, 0])
    assert (cache.stats().blocks_used, cache.stats().tokens, cache.stats().wasted_slots) == (2, 9, 7)
    cache.reset()
    assert cache.stats() == empty


def test_shared_blocks_count_once(model):
    cache = PagedCache(model.config, block_size=8)
    step(model, cache, torch.randint(3, 128, (1, 20)))
    alone = cache.stats()
    cache.batch_repeat_interleave(3)
    shared = cache.stats()
    assert (shared.blocks_used, shared.blocks_shared, shared.tokens) == (3, 3, 20)
    assert shared.bytes_used == alone.bytes_used and shared.wasted_slots == alone.wasted_slots == 4
    step(model, cache, torch.randint(3, 128, (3, 1)))  # the partly filled block is copied for two of the sequences
    apart = cache.stats()
    assert (apart.blocks_used, apart.blocks_shared, apart.tokens) == (5, 2, 16 + 3 * 5)


def test_rows_that_share_a_block_to_different_depths(llama):
    cache = PagedCache(llama.config, block_size=8)
    step(llama, cache, torch.randint(3, 128, (1, 14)))
    cache.batch_repeat_interleave(2)
    cache.rewind([10, 14])
    assert (cache.stats().tokens, cache.stats().wasted_slots) == (14, 2)


def test_beam_search_shares_its_prompt(model):
    cache = PagedCache(model.config, block_size=8)
    prompt = left_padded_batch((64,), seed=3)
    model.generate(**prompt, max_new_tokens=9, num_beams=4, do_sample=False, past_key_values=cache)
    stats = cache.stats()
    assert stats.blocks_shared >= 8 and stats.blocks_used <= 8 + 4 * 2 < 4 * 9
    assert stats.blocks_used == cache.num_used_blocks == len({b for table in cache.state.pool.tables for b in table})
    assert stats.tokens + stats.wasted_slots == stats.blocks_used * 8


def test_the_hit_rate_of_the_prefix_cache():
    model = tiny_model("llama")
    prefix, ids = PrefixCache(model, num_blocks=8, block_size=8), torch.randint(3, 128, (1, 18))
    for rate in (0, 0.5):
        cache = PagedCache(model.config, block_size=8, prefix_cache=prefix)
        assert cache.stats().prefix_hit_rate == 0
        step(model, cache, ids, logits_to_keep=1)
        assert cache.stats().prefix_hit_rate == pytest.approx(rate, abs=0.06)
    assert "; prefix hits" in str(cache.stats())


@pytest.mark.parametrize("memory", [5 * BLOCK_BYTES + 17, f"{5 * BLOCK_BYTES / 1000 + 0.017}KB"])
def test_a_budget_of_bytes(model, memory):
    cache = PagedCache(model.config, block_size=8, memory=memory)
    inputs = left_padded_batch((11,))
    for _ in range(2):
        expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        assert torch.equal(
            model.generate(**inputs, max_new_tokens=20, do_sample=False, past_key_values=cache), expected
        )
        stats = cache.stats()
        assert stats.blocks_used + stats.blocks_free == 5 and stats.bytes_allocated == 5 * BLOCK_BYTES
        cache.reset()


def test_the_dtype_of_the_first_forward_counts():
    model = tiny_model("llama", torch.bfloat16)  # its config says float32
    cache = PagedCache(model.config, block_size=8, memory=5 * BLOCK_BYTES)
    for dtype, blocks in ((torch.bfloat16, 10), (torch.float32, 5)):
        step(model.to(dtype), cache, torch.randint(3, 128, (1, 9)))
        assert cache.stats().blocks_used + cache.stats().blocks_free == blocks
        cache.reset()


def test_budgets_that_cannot_be(llama):
    for memory in (0, -1, True, "much", "0GB", 1.5):
        with pytest.raises(ValueError, match=r"memory=.*must be a positive number of bytes"):
            PagedCache(llama.config, memory=memory)
    with pytest.raises(ValueError, match=r"num_blocks=4 and memory='1GB': give one"):
        PagedCache(llama.config, num_blocks=4, memory="1GB")
    cache = PagedCache(llama.config, block_size=8, memory=BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match=f"holds not one block: 8 tokens in 2 layers take {BLOCK_BYTES} bytes"):
        step(llama, cache, torch.ones(1, 3, dtype=torch.long))
    assert cache.cache_seqlens == []
    for size in (dict(num_blocks=10**12), dict(memory=10**20)):
        with pytest.raises(ValueError, match=rf"{next(iter(size))}=10* ?.*: must be at most"):
            step(llama, PagedCache(llama.config, **size), torch.ones(1, 3, dtype=torch.long))


def test_layers_larger_than_the_first_are_refused(llama):
    cache = PagedCache(llama.config, block_size=8, memory="1MB")
    llama.set_attn_implementation("sdpa")
    cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match=r"4096 bytes in layer 1 and 2048.*give num_blocks"):
        cache.update(torch.ones(1, 2, 3, 32), torch.ones(1, 2, 3, 32), 1)


def test_a_full_pool_keeps_the_running_sequences(model):
    """What is missing is said, the sequences are as they were, and they go on after one of them is freed."""
    ids = torch.randint(3, 128, (2, 16))
    cache = PagedCache(model.config, block_size=8, memory=5 * BLOCK_BYTES)
    step(model, cache, ids)
    before = {name: pages.clone() for name, pages in cache.layers[1].store.pages.items()}
    with pytest.raises(
        ValueError, match=r"needs 6 blocks \(4 in use and 2 more\), 1 more than there are.*batch_select_indices\(\)"
    ):
        step(model, cache, torch.randint(3, 128, (2, 3)))
    assert cache.cache_seqlens == [16, 16] and cache.stats().blocks_used == 4
    assert all(torch.equal(before[name], pages) for name, pages in cache.layers[1].store.pages.items())
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.stats().blocks_used == 2
    more = torch.randint(3, 128, (1, 20))
    full = step(model, None, torch.cat([ids[1:], more], 1), use_cache=False)[:, -20:]
    torch.testing.assert_close(step(model, cache, more), full, rtol=1e-4, atol=1e-4)
