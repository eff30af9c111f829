"""PrefixCache of int4 and int2 pages, which keep a sequence's first block and newest tokens beside the blocks."""

import pytest
import torch
from helpers import tiny_model
from kv_models import step
from transformers import DynamicCache

from hf_efficient import Offload, PagedCache, PrefixCache


SIZE = 16
FORMATS = ["int4", "int2"]
IDS = torch.randint(3, 128, (3, 320), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def shared_llama():
    return tiny_model("llama", max_position_embeddings=512)


def new_cache(model, kv_format, prefix, **kwargs):
    return PagedCache(model.config, block_size=SIZE, kv_format=kv_format, prefix_cache=prefix, **kwargs)


def stored(model, kv_format, ids, num_blocks=64):
    """A PrefixCache that has seen the prompts `ids` [B, n], and how many tokens of each it can have: those that a
    cache's window of 128 tokens lets go."""
    prefix = PrefixCache(model, num_blocks, block_size=SIZE, kv_format=kv_format)
    cache = new_cache(model, kv_format, prefix)
    step(model, cache, ids)
    return prefix, cache, (ids.shape[1] - 128) // SIZE * SIZE


@torch.no_grad()
def after(model, source, row, ids, length):
    """Logits of ids [1, n] behind the first `length` tokens of that row of a cache, as its pages have them, by a
    DynamicCache: the first block exact."""
    cache = DynamicCache()
    for number, layer in enumerate(source.layers):
        table = torch.tensor([source.state.pool.tables[row]], dtype=torch.int32)
        one = type(layer.store).__new__(type(layer.store))
        one.__dict__.update(layer.store.__dict__)
        one.rows = {name: tensor[row : row + 1] for name, tensor in layer.store.rows.items()}
        one.quantized = [layer.store.quantized[row]]
        keys, values = one.gather(table, [source.cache_seqlens[row]])
        cache.update(*(x[None, :length].transpose(1, 2) for x in (keys, values)), number)
    model.set_attn_implementation("sdpa")
    logits = model(ids, past_key_values=cache).logits
    model.set_attn_implementation("flash_paged")
    return logits


def close(ours, theirs):
    """The same sums in another order, and keys that lie between two codes rounded either way."""
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("implementation", ["flash_paged", "sdpa"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_cut_prompt_sees_the_pages_and_the_first_block_as_it_was(llama, kv_format, implementation):
    llama.set_attn_implementation(implementation)
    prefix, source, settled = stored(llama, kv_format, IDS[:2])
    assert settled == 192
    # whole, parting in a block, cut in one, in the first
    for length, shared in ((250, 250), (150, 100), (178, 178), (18, 18)):
        ids = torch.cat([IDS[:2, :shared], IDS[2:, shared:length].expand(2, -1)], 1)
        cut = min(settled, shared // SIZE * SIZE, length - 3)
        before, cache = prefix.stats()["skipped_tokens"], new_cache(llama, kv_format, prefix)
        llama.set_attn_implementation(implementation)
        output = step(llama, cache, ids, logits_to_keep=3)
        assert prefix.stats()["skipped_tokens"] - before == 2 * cut
        assert cache.cache_seqlens == [length, length]
        for row in range(2):
            close(output[row : row + 1], after(llama, source, row, ids[row : row + 1, cut:], cut)[:, -3:])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_later_chunks_and_what_follows(llama, kv_format):
    """A second chunk is cut too; then tokens are appended, quantized and taken back."""
    prefix, source, settled = stored(llama, kv_format, IDS[:1])
    cache = new_cache(llama, kv_format, prefix)
    step(llama, cache, IDS[:1, :37])  # asks for all logits, so it runs
    output = step(llama, cache, IDS[:1, 37:200], logits_to_keep=1)
    assert prefix.stats()["skipped_tokens"] == settled - 37
    close(output, after(llama, source, 0, IDS[:1, settled:200], settled)[:, -1:])
    more = torch.randint(3, 128, (1, 60))
    whole = PagedCache(llama.config, block_size=SIZE, kv_format=kv_format)
    step(llama, whole, torch.cat([IDS[:1, :200], more[:, :20]], 1))
    for column in range(20):
        step(llama, cache, more[:, column : column + 1])
    cache.crop(-30)
    cache.crop(-20)
    assert cache.cache_seqlens == [170] and cache.layers[0].store.quantized == [160 - SIZE]
    output = step(llama, cache, IDS[:1, 170:200])
    close(output, after(llama, source, 0, IDS[:1, 170:200], 170))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_blocks_that_make_room_take_their_beginnings_along(llama, kv_format):
    prefix, _, settled = stored(llama, kv_format, IDS[:1], 14)
    for row in (1, 2, 0, 1, 1, 2):
        ids = IDS[row : row + 1]
        source = new_cache(llama, kv_format, None)
        step(llama, source, ids)
        before, cache = prefix.stats()["skipped_tokens"], new_cache(llama, kv_format, prefix)
        output = step(llama, cache, ids[:, :200], logits_to_keep=1)
        cut = prefix.stats()["skipped_tokens"] - before
        close(output, after(llama, source, 0, ids[:, cut:200], cut)[:, -1:])
        step(llama, new_cache(llama, kv_format, prefix), ids)
        first = set(prefix._pool.tree._root.children.values())
        assert {node for node in prefix._pool.tree.nodes() if node.beginning is not None} == first
    assert prefix.stats()["hits"] > 0 and prefix.stats()["evicted_blocks"] > 2 * 14
    prefix.clear()
    assert prefix.stats()["bytes"] == 0


@pytest.mark.parametrize("kv_format", FORMATS)
def test_generation_of_many_kinds(llama, kv_format):
    """Padded batches, beams, prompt lookup and offloaded pages, twice each: the second time most of the prompt is
    there."""
    prefix = PrefixCache(llama, 256, block_size=SIZE, kv_format=kv_format)
    ids, mask = IDS[:2, :300].clone(), torch.ones(2, 300, dtype=torch.long)
    ids[1, :70], mask[1, :70] = 0, 0
    for kwargs in (
        dict(num_beams=2),
        dict(prompt_lookup_num_tokens=3),
        dict(prefill_chunk_size=120),
        dict(offload=True),
    ):
        inputs, skipped = dict(input_ids=ids, attention_mask=mask), []
        if "prompt_lookup_num_tokens" in kwargs:
            inputs = dict(input_ids=ids[:1])
        for _ in range(2):
            offload = Offload("1GB") if kwargs.pop("offload", None) else None
            cache, before = new_cache(llama, kv_format, prefix, offload=offload), prefix.stats()["skipped_tokens"]
            output = llama.generate(
                **inputs, **kwargs, past_key_values=cache, max_new_tokens=24, min_new_tokens=24, do_sample=False
            )
            skipped.append(prefix.stats()["skipped_tokens"] - before)
            assert output.shape == (len(inputs["input_ids"]), 324)
        assert skipped[1] >= 96 * len(inputs["input_ids"]), kwargs  # of 230 tokens, of which 128 are in the window
    assert prefix.stats()["bypassed"] == 0


def test_memory_is_that_of_the_codes_and_of_each_beginning(llama):
    prefix, cache, _ = stored(llama, "int4", IDS[:2], 24)
    assert prefix.stats()["used_blocks"] == 24
    full = 2 * 2 * SIZE * 2 * 16 * 4  # layers, keys and values, tokens, heads, dims, bytes
    # codes, scale and minimum of each token, or of 16 channels of a group of 16
    codes = 2 * 2 * SIZE * 2 * (16 / 2 + 2 * 2)
    assert prefix.stats()["bytes"] == 24 * codes + 2 * full
