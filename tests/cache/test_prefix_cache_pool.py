"""The pages of a PrefixCache: how many there are, of what format, where they lie, and who uses them at once."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from helpers import left_padded_batch, tiny_config, tiny_model
from prefix_models import SIZE, forward, generate, new_prefix, prompts, skipped
from torch import nn

from hf_efficient import Offload, PagedCache, PrefixCache, PrefixOffload


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_a_small_pool(llama, num_blocks):
    """Batches that want more blocks than there are, and one another's."""
    prefix = new_prefix(llama, num_blocks)
    for seed in (0, 1, 0, 2, 2):
        inputs = left_padded_batch((33, 40, 21), seed=seed)
        assert torch.equal(generate(llama, inputs, prefix), generate(llama, inputs))
        assert prefix.stats()["used_blocks"] == num_blocks == prefix.stats()["num_blocks"]
    assert prefix.stats()["evicted_blocks"] > 0
    pools = [tensor for pools in prefix._pool.pools for tensor in pools.values()]
    assert prefix.stats()["bytes"] == sum(pool.nbytes for pool in pools)
    assert all(len(pool) == num_blocks for pool in pools)


def test_a_pool_of_so_many_bytes(llama):
    per_block = 2 * 2 * SIZE * 2 * 16 * 4  # layers, keys and values, tokens, heads, head dim, float32
    prefix = PrefixCache(llama, memory=10 * per_block + 1, block_size=SIZE)
    cache = PagedCache(llama.config, block_size=SIZE, memory=30 * per_block, prefix_cache=prefix)
    for _ in range(2):
        assert torch.equal(generate(llama, prompts(), cache=cache), generate(llama, prompts()))
        cache.reset()
    assert prefix.stats()["num_blocks"] == 10 and prefix.stats()["bytes"] == 10 * per_block
    assert (
        cache.stats().prefix_hit_rate == prefix.hit_rate == prefix.stats()["skipped_tokens"] / (2 * (33 + 40 + 21)) > 0
    )
    prefix = PrefixCache(llama, memory=per_block - 1, block_size=SIZE)
    with pytest.raises(ValueError, match=rf"memory={per_block - 1}\): a block over all layers takes {per_block} bytes"):
        generate(llama, prompts(), prefix)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantized_pages(llama, kv_format, implementation):
    """As in two forwards: what was restored has been through the pages, and so is not what a whole forward sees. A key
    that lies between two codes may be rounded either way, which the tolerance allows."""
    llama.set_attn_implementation(implementation)
    options = dict(block_size=SIZE, kv_format=kv_format)
    prefix, ids = PrefixCache(llama, 64, **options), prompts((40, 40), shared=32)["input_ids"]
    other = torch.cat([ids[:, :32], left_padded_batch((9, 9), seed=2)["input_ids"]], 1)
    forward(llama, PagedCache(llama.config, prefix_cache=prefix, **options), ids)
    whole = PagedCache(llama.config, **options)
    forward(llama, whole, other[:, :32])
    expected = forward(llama, whole, other[:, 32:])
    cache = PagedCache(llama.config, prefix_cache=prefix, **options)
    output, saved = skipped(prefix, lambda: forward(llama, cache, other, logits_to_keep=3))
    assert saved == 2 * 32 and cache.cache_seqlens == [41, 41]
    torch.testing.assert_close(output, expected[:, -3:], rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert prefix.stats()["bytes"] < new_prefix_bytes(llama) / 2
    with pytest.raises(ValueError, match=f"kv_format='auto' with a prefix_cache of kv_format='{kv_format}'"):
        PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)


def new_prefix_bytes(model):
    prefix = new_prefix(model)
    generate(model, prompts((16,)), prefix, new_tokens=1)
    return prefix.stats()["bytes"]


def test_pages_that_leave_the_device(llama):
    prefix, offload = new_prefix(llama), Offload(1)
    caches = [PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix, offload=offload) for _ in range(3)]
    first = caches[0]
    for seed, cache in zip((0, 1, 0), caches):
        expected = generate(llama, prompts(seed=seed))
        output, saved = skipped(prefix, lambda: generate(llama, prompts(seed=seed), cache=cache))  # noqa: B023
        assert torch.equal(output, expected) and (saved > 0) == (cache is not first)
        cache.park()
    assert offload.bytes_to_host > 0


def test_a_full_cache_says_so(llama):
    prefix = new_prefix(llama)
    generate(llama, prompts((40,)), prefix)
    cache = PagedCache(llama.config, block_size=SIZE, num_blocks=3, prefix_cache=prefix)
    with pytest.raises(ValueError, match=r"num_blocks=3.*too small: this step needs"):
        generate(llama, prompts((40,)), cache=cache)
    assert torch.equal(generate(llama, prompts((12,)), cache=cache), generate(llama, prompts((12,))))


def test_caches_in_turn_and_in_threads(llama):
    prefix = new_prefix(llama, 12)  # less than they want
    caches = [PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix) for _ in range(3)]
    ids = [prompts((40,), seed=seed)["input_ids"] for seed in range(3)]
    expected = [forward(llama, None, row, use_cache=False) for row in ids]
    for start in range(0, 40, 5):
        for cache, row, logits in zip(caches, ids, expected):
            piece = row[:, start : start + 5]
            output = forward(llama, cache, piece, logits_to_keep=2)
            torch.testing.assert_close(output, logits[:, start + 3 : start + 5], rtol=1e-5, atol=1e-4)

    wanted = {seed: generate(llama, prompts(seed=seed)) for seed in range(4)}
    results, errors = [], []

    def work(seed):
        try:
            for turn in range(3):
                number = (seed + turn) % 4
                results.append(torch.equal(generate(llama, prompts(seed=number), prefix), wanted[number]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 12 and all(results)


def test_planned_and_compiled_forwards(llama):
    """A in_decode_step forward is stored like any other; what a compiled one appended is not, nor what follows."""
    prefix, ids = new_prefix(llama), prompts((15,))["input_ids"]
    for decode, stored in ((llama, 2), (torch.compile(llama.forward, backend="eager", fullgraph=True), 1)):
        prefix.clear()
        cache = PagedCache(llama.config, block_size=SIZE, num_blocks=8, prefix_cache=prefix)
        forward(llama, cache, ids)
        with torch.no_grad(), cache.decode_step() as position_ids:
            decode(ids[:, :1], position_ids=position_ids, past_key_values=cache)
        forward(llama, cache, ids)
        assert cache.cache_seqlens == [31] and prefix.stats()["used_blocks"] == stored + (decode is llama)


def test_in_inference_mode_and_outside(llama):
    prefix, inputs = new_prefix(llama), prompts()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generate(llama, inputs, prefix), generate(llama, inputs))
    # two whole blocks of the shortest sequence, and 19 columns of padding
    assert prefix.stats()["skipped_tokens"] == 2 * (35 + 28 + 16)


def test_hooks_and_memory_go_with_it():
    model = tiny_model("llama", attn_implementation="flash_paged")
    gc.disable()
    try:
        prefix = new_prefix(model)
        generate(model, prompts(), prefix, new_tokens=2)
        pool = weakref.ref(prefix._pool.pools[0]["keys"])
        prefix.clear()
        assert pool() is None and prefix.stats()["bytes"] == 0
        prefix = weakref.ref(prefix)
        assert prefix() is None and not model._forward_hooks and not model._forward_pre_hooks
        kept, model = new_prefix(model), weakref.ref(model)
        gc.collect()
        assert model() is None and kept.stats()["used_blocks"] == 0
    finally:
        gc.enable()


@torch.no_grad()
def test_a_hooked_model_is_copied_and_pickled():
    model = tiny_model("llama")
    prefix = PrefixCache(model, num_blocks=4)
    # before transformers' own hooks, which are not pickled
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    before, ids = dict(prefix.stats()), torch.arange(3, 40)[None]
    for other in copies:
        logits = other(ids, past_key_values=PagedCache(other.config)).logits
        torch.testing.assert_close(logits, model(ids, past_key_values=PagedCache(model.config)).logits)
    assert prefix.stats() == before


def test_bad_arguments(llama):
    for arguments, message in (
        (dict(model=llama.config), "model=LlamaConfig: must be a transformers model"),
        (dict(model=nn.Linear(2, 2)), "model=Linear: must be a transformers model"),
        (dict(num_blocks=0), "num_blocks=0: must be a positive integer"),
        (dict(num_blocks=2.0), "num_blocks=2.0: must be"),
        (dict(num_blocks=True), "num_blocks=True: must be"),
        (dict(num_blocks=10**20), f"num_blocks={10**20}: must be at most 16777216"),
        (dict(num_blocks=None), "num_blocks=None and memory=None: give one of them"),
        (dict(memory="1GB"), "num_blocks=4 and memory='1GB': give one of them"),
        (dict(num_blocks=None, memory="much"), "memory='much': must be a positive number of bytes"),
        (dict(block_size=12), "block_size=12: must be 8, 16"),
        (dict(kv_format="int3"), "kv_format=.int3.: must be one of auto, int8"),
    ):
        with pytest.raises(ValueError, match=message):
            PrefixCache(**{"model": llama, "num_blocks": 4, **arguments})
    for pool, argument in (
        (dict(memory=10**20), "memory=1"),
        (dict(num_blocks=4, offload=PrefixOffload(10**20)), "host_memory=1"),
    ):
        prefix = PrefixCache(llama, **pool)
        with pytest.raises(ValueError, match=rf"{argument}0* holds .* blocks of .* must be at most"):
            generate(llama, left_padded_batch((33,)), prefix)
    with pytest.raises(ValueError, match="prefix_cache=True: must be an hf_efficient.PrefixCache"):
        PagedCache(llama.config, prefix_cache=True)
    with pytest.raises(ValueError, match="block_size=16 with a prefix_cache of block_size=8"):
        PagedCache(llama.config, prefix_cache=new_prefix(llama))
    with pytest.raises(ValueError, match="made for another model"):
        PagedCache(tiny_config("qwen3"), block_size=SIZE, prefix_cache=new_prefix(llama))


def test_models_whose_keys_depend_on_more_than_the_tokens_before():
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    with pytest.raises(ValueError, match="rope_type='dynamic'.*length of the whole prompt"):
        new_prefix(tiny_model("llama", rope_parameters=rope))
    with pytest.raises(ValueError, match="attention is not causal"):
        new_prefix(tiny_model("gemma3", use_bidirectional_attention=True))
