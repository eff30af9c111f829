"""A pool takes memory for the tokens that are written, not for those that it has room for."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from native_loop import CAPTURES

from hf_efficient import PagedCache, enable_speculation
from hf_efficient.cache.bookkeeping.tensors import _ALLOCATOR_BYTES, lazy_zeros
from hf_efficient.cache.stats import written_bytes
from hf_efficient.generation import model_state
from hf_efficient.generation.replay import captured_forward, pool


pytestmark = pytest.mark.native_loop
needs_smaps = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
MANY = 1 << 18  # tokens
A_ROW = 1 << 16  # bytes: what a row of few tokens may take of a tensor, in the few pages of memory that it touches


def resident(tensors) -> int:
    """Bytes of the system's pages of memory that hold parts of `tensors`."""
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(number, 16) for number in place.groups())
            inside = any(begin < end and start < stop for begin, stop in spans)
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@needs_smaps
def test_what_is_not_written_takes_no_memory():
    x = lazy_zeros(torch.empty(0, dtype=torch.bfloat16), 1 << 12, 1 << 12)
    assert x.shape == (1 << 12, 1 << 12) and x.dtype is torch.bfloat16 and x.is_contiguous()
    assert resident([x]) < A_ROW
    x[5] = 1
    x[4000, 7] = 2
    assert resident([x]) <= 2 * A_ROW and x[:16].sum() == 1 << 12 and x[4000].sum() == 2
    assert (x[100:110] == 0).all() and lazy_zeros(x, 3, dtype=torch.int8).tolist() == [0, 0, 0]


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8", "int4"])
@needs_smaps
def test_a_pool_of_fixed_size(kv_format):
    model = tiny_model("llama", attn_implementation="flash_paged")
    cache = PagedCache(model.config, num_blocks=MANY // 64, block_size=64, kv_format=kv_format)
    with torch.no_grad():
        model(torch.randint(3, 128, (2, 200)), past_key_values=cache, use_cache=True)
    pages = [x for layer in cache.layers for x in layer.store.pages.values() if x.nbytes >= _ALLOCATOR_BYTES]
    assert len(pages) >= 4 and sum(x.nbytes for x in pages) >= 20 << 20
    assert resident(pages) <= 2 * A_ROW * len(pages)
    assert kv_format == "int4" or resident(pages), "the last 128 tokens of int4 lie elsewhere"


@CAPTURES  # whose caches are kept
@needs_smaps
@pytest.mark.parametrize(("rows", "lookup"), [(1, None), (8, None), (2, 4)])
def test_generate_takes_memory_for_what_it_writes(rows, lookup):
    model = enable_speculation(tiny_model("llama", max_position_embeddings=MANY))
    ids = torch.randint(3, 128, (rows, 9))
    options = dict(do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=lookup)
    free = model.generate(ids, max_new_tokens=17, **options)
    ends = free[:, 9:].flatten().tolist()  # some token that comes early
    model_state.latest(model).pool.entries.clear()
    output = model.generate(ids, max_new_tokens=MANY, eos_token_id=ends, **options)
    assert output.shape[1] <= 9 + 17
    kept = model_state.latest(model).pool.entries[-1]
    pages = [x for layer in kept.cache.layers for x in layer.store.pages.values()]
    tables = kept.cache.layers[0].state.tables.values()
    assert sum(x.nbytes for x in pages) > rows * (100 << 20), "room for all of them"
    assert 0 < resident(pages) <= rows * A_ROW * len(pages)
    large = [x.block_table for x in tables if x.block_table.nbytes >= _ALLOCATOR_BYTES]
    assert len(large) == 1 and resident(large) <= rows * A_ROW
    assert 0 < written_bytes(kept.cache) < 1 << 20


@CAPTURES
def test_a_cache_with_many_written_bytes_is_dropped(monkeypatch):
    monkeypatch.setattr(pool, "MAX_CACHE_SHARE", 0.0)
    model, ids = enable_speculation(tiny_model("llama", eos_token_id=None)), torch.randint(3, 128, (1, 9))

    def generate(number, **options):
        model.generate(ids, max_new_tokens=number, do_sample=False, pad_token_id=0, **options)
        return model_state.latest(model).pool.entries

    small = written_bytes(generate(20)[-1].cache)
    assert written_bytes(generate(20)[-1].cache) == small, "the same blocks again"
    monkeypatch.setattr(pool, "MAX_CACHE_BYTES", 2 * small)
    assert generate(20) and not generate(200)


@CAPTURES
def test_more_is_kept_of_a_larger_model(monkeypatch):
    model = tiny_model("llama")
    weights = model.get_memory_footprint()
    assert captured_forward.kept_bytes(model) == captured_forward.LEAST_KEPT_BYTES
    monkeypatch.setattr(captured_forward, "LEAST_KEPT_BYTES", 1)
    assert captured_forward.kept_bytes(model) == weights // 4
    ids = torch.randint(3, 128, (1, 60))
    enable_speculation(model).generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    (entry,) = model_state.latest(model).pool.entries
    assert entry.captured.most_bytes == entry.captured.prompt.most_bytes == weights // 4
