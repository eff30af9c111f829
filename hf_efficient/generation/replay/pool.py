"""Recorded forwards that outlive a `generate()` call: with the cache that they read, for the next call on the model."""

import threading
from typing import NamedTuple

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.stats import written_bytes
from hf_efficient.cache.stores.kv_formats import block_size_of
from hf_efficient.generation.model_state import ModelState
from hf_efficient.generation.replay.captured_forward import CapturedForward


MOST_BYTES = 256 << 20  # a cache of which more was written is not kept
MOST = 2  # of a model: with and without what draft heads read of it


class PoolEntry(NamedTuple):
    """A cache and what was recorded over it. state: of the model when the cache was made; None where it shall not be kept.
    hidden_of: what is read of the model besides logits (`RaggedModel`). is_capturable: whether forwards may be recorded."""

    state: ModelState | None
    hidden_of: tuple[int, ...] | None
    cache: PagedCache
    captured: CapturedForward | None
    is_capturable: bool

    @classmethod
    def of(cls, cache: PagedCache) -> "PoolEntry":
        """A cache over which nothing is recorded."""
        return cls(None, None, cache, None, False)


_lock = threading.Lock()


def take(
    model, rows: int, tokens: int | None, hidden_of: tuple[int, ...] | None, state: ModelState, keep=True
) -> PoolEntry:
    """A cache with room for `rows` rows of `tokens` tokens, and what was recorded over it: another call's that has ended, if
    nothing about the model has changed, else new and empty. Until `give_back` nobody else is given it. Where nothing can be
    recorded, or `tokens` is None, it grows. state: the model's; keep: whether there will be another call."""
    if tokens is None or not state.is_capturable:
        cache = PagedCache(model.config)
        if state.runs_over_pages and state.reads_pages:
            cache.attend_over_pages()
        return PoolEntry.of(cache)
    with _lock:
        kept = next((kept for kept in state.kept if keep and kept.hidden_of == hidden_of), None)
        if kept is not None:
            state.kept.remove(kept)
    blocks = rows * -(-max(512, 1 << (tokens - 1).bit_length()) // block_size_of("auto", None))
    if kept is not None and kept.cache.state.pool.num_blocks >= blocks:
        present = kept.cache.batch_size
        kept.cache.rewind([0] * present)
        if present != rows:
            kept.cache.batch_select_indices(torch.zeros(rows, dtype=torch.int64))
        return kept
    cache = PagedCache(model.config, num_blocks=blocks)
    if state.runs_over_pages:
        cache.attend_over_pages()
    for layer in cache.layers:
        layer.exact = False  # nobody else sees this cache: its pages are read where they lie, prompts too
    return PoolEntry(state if keep else None, hidden_of, cache, None, True)


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


def give_back(kept: PoolEntry, captured: CapturedForward | None) -> None:
    """After a call that nobody holds the cache of."""
    if captured is None or kept.state is None or not kept.state.snapshot.complete:
        return
    if written_bytes(kept.cache) > MOST_BYTES:
        return
    captured.forward = captured.holds = None
    with _lock:
        others = [other for other in kept.state.kept if other.hidden_of != kept.hidden_of]
        kept.state.kept = [*others, kept._replace(captured=captured)][-MOST:]
