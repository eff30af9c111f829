"""PrefixCache(offload=...): blocks without room in the pool come back from host memory and from the disk."""

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import FORMATS
from prefix_models import SIZE, forward, generate, prompts

from hf_efficient import PagedCache, PrefixCache, PrefixOffload
from hf_efficient.cache.bookkeeping.recompute import Rates


BLOCK = 2 * 2 * SIZE * 2 * 16 * 4  # bytes: layers, keys and values, tokens, heads, head dim, float32


def tiered(model, folder, pool=4, host=4, disk=32, block_bytes=BLOCK, **kwargs):
    offload = PrefixOffload(host * block_bytes, *((folder, disk * block_bytes) if disk else ()))
    return PrefixCache(model, pool, offload=offload, **{"block_size": SIZE, **kwargs})


def hits(prefix):
    return [prefix.stats()[f"{name}_hits"] for name in ("pool", "host", "disk")]


def test_blocks_come_back_from_every_tier(llama, tmp_path):
    """The same tokens, restored, as with a pool that holds all; and the files hold no more than their budget."""
    llama.set_attn_implementation("flash_paged")
    texts = [left_padded_batch((33,), seed=seed) for seed in range(6)]
    prefix, large = tiered(llama, tmp_path), PrefixCache(llama, 64, block_size=SIZE)
    for text in [*texts, *texts, *reversed(texts)]:
        expected, actual = generate(llama, text, large), generate(llama, text, prefix)
        assert torch.equal(actual, expected)
    stats = prefix.stats()
    assert min(hits(prefix)) > 0 and stats["evicted_blocks"] > 0
    assert stats["used_blocks"] <= 4 and stats["host_bytes"] <= 4 * BLOCK and stats["disk_bytes"] <= 32 * BLOCK
    assert stats["skipped_tokens"] == (sum(hits(prefix))) * SIZE == large.stats()["skipped_tokens"]
    (file,) = tmp_path.iterdir()
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        assert opened.get_slice("blocks").get_shape() == [32, BLOCK]
    prefix.clear()
    assert not list(tmp_path.iterdir()) and prefix.stats()["disk_bytes"] == 0


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_format_of_pages(kv_format, tmp_path):
    """Blocks that come back have the bits that left: logits are those of a pool that holds all."""
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    size = {"int4": 64, "int2": 32}.get(kv_format, 16)
    texts = [left_padded_batch((6 * size + 150,), seed=seed)["input_ids"] for seed in range(3)]
    options = dict(block_size=size, kv_format=kv_format)
    pool = len(texts[0][0]) // size + 1
    prefix, large = tiered(model, tmp_path, pool, 4, 30, 1 << 15, **options), PrefixCache(model, 64, **options)
    for text in [*texts, *texts]:
        caches = [PagedCache(model.config, prefix_cache=each, **options) for each in (prefix, large)]
        actual, expected = (forward(model, cache, text, logits_to_keep=1) for cache in caches)
        assert torch.equal(actual, expected)
    assert hits(prefix)[1] + hits(prefix)[2] > 0
    assert prefix.stats()["skipped_tokens"] == large.stats()["skipped_tokens"] > 0


def test_a_prompt_longer_than_the_pool(llama, tmp_path):
    llama.set_attn_implementation("flash_paged")
    prefix, large = tiered(llama, tmp_path, pool=2, host=3), PrefixCache(llama, 64, block_size=SIZE)
    texts = [left_padded_batch((69,), seed=seed) for seed in (1, 2)]
    for text in [*texts, *texts, texts[1]]:
        assert torch.equal(generate(llama, text, prefix), generate(llama, text, large))
    assert prefix.stats()["skipped_tokens"] == large.stats()["skipped_tokens"] == 3 * 64
    assert min(hits(prefix)) > 0


def test_batches_take_one_anothers_room(llama, tmp_path):
    """Ragged batches, whose sequences want more blocks than pool and host memory have."""
    prefix = tiered(llama, tmp_path, pool=3, host=4, disk=32)
    for seed in (0, 1, 0, 2, 0, 1):
        inputs = prompts((33, 40, 35), seed=seed)
        assert torch.equal(generate(llama, inputs, prefix), generate(llama, inputs))
    assert hits(prefix)[1] + hits(prefix)[2] > 0


def test_leading_tokens_are_computed_where_reading_is_slower(llama, tmp_path):
    """Speeds are given, not measured. Two leading blocks cost less than reading them, the others more."""
    llama.set_attn_implementation("flash_paged")
    prefix, text = tiered(llama, tmp_path, pool=5, host=8), left_padded_batch((41,), seed=1)
    expected = generate(llama, text)
    for each in (text, left_padded_batch((41,), seed=2)):
        generate(llama, each, prefix, new_tokens=1)
    rates = prefix._rates
    rates.computed = rates.was_read = lambda *_: None
    rates.clock = lambda: 0.0
    rates._flops, rates.seconds_per_flop = (1.0, 1.0), 1.0
    rates.seconds_per_byte = dict.fromkeys((1, 2), rates.flops(SIZE, SIZE) * 1.1 / BLOCK)
    before = prefix.stats()
    assert torch.equal(generate(llama, text, prefix), expected)
    after = prefix.stats()
    assert after["recomputed_tokens"] - before["recomputed_tokens"] == 2 * SIZE
    assert after["skipped_tokens"] - before["skipped_tokens"] == 3 * SIZE
    assert (after["hits"], after["bypassed"]) == (before["hits"] + 1, before["bypassed"])


def test_a_forward_that_fails_after_computing_again(llama, tmp_path):
    llama.set_attn_implementation("flash_paged")
    prefix, text = tiered(llama, tmp_path, pool=5, host=8), left_padded_batch((41,), seed=1)
    for each in (text, left_padded_batch((41,), seed=2)):
        generate(llama, each, prefix, new_tokens=1)
    rates = prefix._rates
    rates._flops, rates.seconds_per_flop, rates.seconds_per_byte = (1.0, 1.0), 1e-30, {1: 1.0, 2: 1.0}
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    handle = llama.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0 if cache.cache_seqlens else None)
    with pytest.raises(ZeroDivisionError):
        forward(llama, cache, text["input_ids"], logits_to_keep=1)
    handle.remove()
    assert cache.cache_seqlens == []
    expected = forward(llama, PagedCache(llama.config, block_size=SIZE), text["input_ids"])[:, -1:]
    torch.testing.assert_close(forward(llama, cache, text["input_ids"], logits_to_keep=1), expected)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_file_that_cannot_be_read_fails_one_forward(llama, tmp_path, recomputes, monkeypatch):
    """The cache is empty again, and the next forward computes the prompt."""
    llama.set_attn_implementation("flash_paged")
    prefix, text = tiered(llama, tmp_path, pool=2, host=1), left_padded_batch((41,), seed=1)
    for each in (text, left_padded_batch((41,), seed=2)):
        generate(llama, each, prefix, new_tokens=1)
    monkeypatch.setattr(prefix._rates, "leading_blocks", lambda *_: int(recomputes))
    monkeypatch.setattr("os.preadv", lambda *_: 0)  # as of a file that was shortened
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    with pytest.raises(OSError, match="the file of a PrefixCache was shortened"):
        forward(llama, cache, text["input_ids"], logits_to_keep=1)
    assert cache.cache_seqlens == [] and prefix.stats()["disk_blocks"] == 0
    expected = forward(llama, PagedCache(llama.config, block_size=SIZE), text["input_ids"])[:, -1:]
    torch.testing.assert_close(forward(llama, cache, text["input_ids"], logits_to_keep=1), expected)


def test_which_blocks_are_computed():
    rates = Rates(100.0, 1.0)
    tiers = [[2]] * 4
    assert rates.leading_blocks(tiers, 10, 1000) == 0  # nothing was measured
    rates.computed(0, 10, rates.flops(0, 10) * 0.5)
    assert rates.seconds_per_flop == 0.5 and rates.leading_blocks(tiers, 10, 1000) == 0
    costs = [rates.flops(10 * block, 10) * 0.5 for block in range(4)]
    assert costs == sorted(costs) and sum(costs) == pytest.approx(rates.flops(0, 40) * 0.5)
    for number in range(4):
        rates.seconds_per_byte = {2: (costs[number] + 1) / 1000}
        assert rates.leading_blocks(tiers, 10, 1000) == number + 1
        assert rates.leading_blocks([[2, 2]] * 4, 10, 1000) == number + 1
        assert rates.leading_blocks([[0], [2], [2]], 10, 1000) in (0, 3)
    rates.was_read(2, 100, 100.0)
    assert rates.seconds_per_byte[2] == pytest.approx(0.7 * (costs[3] + 1) / 1000 + 0.3)


def test_what_is_refused(llama, tmp_path, monkeypatch):
    for arguments, pattern in (
        ((0,), "host_memory=0: must be a positive number"),
        (("1MB", tmp_path), "give both, the folder and how much may lie there"),
        (("1MB", tmp_path / "none", "1MB"), "must be a folder that exists"),
    ):
        with pytest.raises(ValueError, match=pattern):
            PrefixOffload(*arguments)
    with pytest.raises(ValueError, match="offload=3: must be an hf_efficient.PrefixOffload"):
        PrefixCache(llama, 4, offload=3)
    with pytest.raises(ValueError, match=rf"host_memory=100\): a block over all layers takes {BLOCK} bytes"):
        generate(llama, prompts(), PrefixCache(llama, 4, block_size=SIZE, offload=PrefixOffload(100)))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=rf"disk_memory=\.\.\.\): {32 * BLOCK} bytes: No space left"):
        generate(llama, prompts(), tiered(llama, tmp_path))
    assert not list(tmp_path.iterdir())
