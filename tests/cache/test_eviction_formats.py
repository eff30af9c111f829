"""Eviction from int8 and fp8 pages: what stays is stored as it was first, however often its neighbours leave."""

import pytest
import torch
from helpers import left_padded_batch
from table import SCORERS

from hf_efficient import EvictionPolicy, PagedCache, SinkWindow


def cache_of(model, kv_format, *policy):
    return PagedCache(model.config, block_size=8, kv_format=kv_format, eviction=EvictionPolicy(*policy))


@torch.no_grad()
def feed(model, cache, ids):
    """The ids [B, n] as a prompt of 40 tokens and single ones: the last logits."""
    for part in (ids[:, :40], *ids[:, 40:].split(1, 1)):
        logits = model(part, past_key_values=cache).logits[:, -1]
    return logits


def stored(store, inner, tokens):
    """Everything that the pages hold of tokens number `tokens` of pool sequence `inner`: name -> [n, ...]."""
    slots = torch.tensor([store.pool.slots(inner, token, 1)[0] for token in tokens])
    return {name: pages.flatten(0, 1)[slots] for name, pages in store.pages.items()}


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["TOVA", "KeyNorm", "AdaKV SnapKV"])
def test_codes_are_moved_and_not_made_again(llama, kv_format, name):
    """After nine evictions the first layer's codes are those of the same positions in a cache that evicts nothing."""
    ids = torch.randint(3, 128, (2, 100))
    caches = [cache_of(llama, kv_format, SCORERS[name], budget, "always") for budget in (24, 200)]
    for cache in caches:
        feed(llama, cache, ids)
    evicted, whole = (cache.layers[0].store for cache in caches)
    positions, present = evicted.token_positions()
    for inner, held in enumerate(evicted.pool.lengths):
        assert 12 <= held <= 36
        before = stored(whole, inner, positions[inner, present[inner]].tolist())
        after = stored(evicted, inner, range(held))
        for pages in before:
            assert torch.equal(after[pages], before[pages]), pages


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_sinks_are_quantized_anew_from_what_they_were(llama, kv_format):
    """However often they have been moved on, they are as near as two roundings to where exact ones are."""
    ids = torch.randint(3, 128, (1, 100))
    caches = [cache_of(llama, form, SinkWindow(), 24, "always") for form in (kv_format, "auto")]
    for cache in caches:
        feed(llama, cache, ids)
    codes, exact = (cache.layers[0].store for cache in caches)
    assert codes.pool.tables == exact.pool.tables
    blocks = torch.tensor(exact.pool.tables)[:, :1]
    for name, tokens in zip(("keys", "values"), codes.store.gather(blocks.int(), [4] * len(blocks))):
        expected = exact.pages[name][blocks[:, 0], :4]
        error = (tokens.view(expected.shape) - expected).abs().amax(-1) / expected.abs().amax(-1)
        # rounded as given, which a rotation makes 2 ** 0.5 larger against a maximum as much smaller, and once more
        assert 0 < error.max() < 3 * {"int8": 0.5 / 127, "fp8": 1 / 16}[kv_format]


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_generation_from_quantized_pages_within_a_budget(llama, kv_format):
    """Without anything to evict as without a policy; within a budget the memory is that of the budget, in few bits."""
    inputs = dict(left_padded_batch((30, 64)), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    plain = PagedCache(llama.config, block_size=8, kv_format=kv_format)
    expected = llama.generate(**inputs, past_key_values=plain)
    for name in ("SinkWindow", "HeavyHitter", "Distinctive"):
        scorer = SCORERS[name]
        cache = cache_of(llama, kv_format, scorer, 200)
        assert torch.equal(llama.generate(**inputs, past_key_values=cache), expected)
        sizes = []
        for form in (kv_format, "auto"):
            cache = cache_of(llama, form, scorer, 32, "always")
            assert llama.generate(**inputs, past_key_values=cache).shape == expected.shape
            sizes.append(cache.stats().bytes_allocated)
        assert sizes[0] == sizes[1] * (1 + 2 / 16) / 4  # of float32: a byte, and a float16 scale for 16 of them
