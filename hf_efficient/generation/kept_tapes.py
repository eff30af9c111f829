"""Recorded forwards that outlive a `generate()` call: with the cache that they read, for the next call on the model."""

import threading
import weakref
from typing import NamedTuple

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.prefix_key import ModelKey
from hf_efficient.cache.stats import written_bytes
from hf_efficient.generation.taped_forward import TapedForward


MOST_BYTES = 256 << 20  # a cache of which more was written is not kept
MOST = 2  # of a model: with and without what draft heads read of it


class Kept(NamedTuple):
    """key: `ModelKey.digest`, how the model attends and what is read of it, when the cache was made."""

    key: tuple
    cache: PagedCache
    taped: TapedForward | None


_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> list of Kept, the latest last
_lock = threading.Lock()


def take(model, rows: int, tokens: int | None, hidden_of: tuple[int, ...] | None) -> Kept:
    """A cache with room for `rows` rows of `tokens` tokens, and what was recorded over it: another call's that has ended, if
    nothing about the model has changed, else new and empty. Until `give_back` nobody else is given it. Where nothing can be
    recorded, or `tokens` is None, it grows."""
    cache = PagedCache(model.config)
    if tokens is None or model.device.type != "cpu" or not cache.reads_pages:
        with _lock:
            _kept.pop(model, None)
        return Kept((), cache, None)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    digest = ModelKey(model).digest
    key = digest, attention, hidden_of
    blocks = rows * -(-max(512, 1 << (tokens - 1).bit_length()) // cache.block_size)
    with _lock:
        mine = _kept[model] = [kept for kept in _kept.get(model, ()) if kept.key[0] == digest]
        kept = next((kept for kept in mine if kept.key == key), None)
        if kept is not None:
            mine.remove(kept)
    if kept is not None and kept.cache.state.pool.num_blocks >= blocks:
        present = kept.cache.batch_size
        kept.cache.rewind([0] * present)
        if present != rows:
            kept.cache.batch_select_indices(torch.zeros(rows, dtype=torch.int64))
        return kept
    cache = PagedCache(model.config, num_blocks=blocks)
    for layer in cache.layers:
        layer.exact = False  # nobody else sees this cache: its pages are read where they lie, prompts too
    return Kept(key, cache, None)


def copied(cache: PagedCache, config) -> PagedCache:
    """What `cache`, whose pages are in the model's dtype, holds, in one that grows. config: the model's."""
    copy = PagedCache(config)
    blocks = []
    for state, other in zip(copy.states, cache.states):
        used = list(dict.fromkeys(block for table in other.pool.tables for block in table))
        place = {block: index for index, block in enumerate(used)}
        tables = [[place[block] for block in table] for table in other.pool.tables]
        held = {**other.pool.snapshot(), "capacity": len(used), "tables": tables, "columns": other.columns}
        state.restore(held, None if other.column_mask is None else other.column_mask.clone())
        blocks.append(torch.tensor(used, dtype=torch.int64))
    for layer, other in zip(copy._paged_layers, cache._paged_layers):
        pages = other.store.pages
        layer.lazy_initialization(*(pages[name][:1].transpose(1, 2) for name in ("keys", "values")))
        for name, values in layer.store.pages.items():
            values.copy_(pages[name][blocks[copy.states.index(layer.state)]])
    return copy


def give_back(model, kept: Kept, taped: TapedForward | None) -> None:
    """After a call that nobody holds the cache of."""
    if taped is None or written_bytes(kept.cache) > MOST_BYTES:
        return
    taped.forward = None
    with _lock:
        others = [other for other in _kept.get(model, ()) if other.key != kept.key]
        _kept[model] = [*others, kept._replace(taped=taped)][-MOST:]
