"""Which store each layer of a `PagedCache` gets, decided here alone."""

import functools

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool
from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.stores.evicting import EvictingStore, bind
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.cache.stores.grouped import GroupStore
from hf_efficient.cache.stores.kv_formats import GROUPED, PER_TOKEN, block_size_of
from hf_efficient.cache.stores.memory_budget import MemoryBudget, check_pool_size
from hf_efficient.cache.stores.offload import CacheTiers, Offload
from hf_efficient.cache.stores.quantized import TokenStore


def checked_block_size(kv_format: str, block_size, num_blocks, memory, offload) -> int:
    """Tokens of a block. Raises ValueError for arguments of `PagedCache` that are wrong by themselves."""
    block_size = block_size_of(kv_format, block_size)
    check_pool_size(num_blocks, memory)
    if offload is not None and not isinstance(offload, Offload):
        raise ValueError(f"offload={offload!r}: must be an hf_efficient.Offload")
    return block_size


class StoreFactory:
    """Makes the stores of one cache's layers. states: of every layer that stores keys and values. The others: as in
    `PagedCache`.

    Raises ValueError for an eviction that the model or the other arguments exclude.
    """

    def __init__(
        self, states: list[CacheState], layer_types: list[str], kv_format, num_blocks, memory, eviction, prefix_cache,
        offload,
    ):  # fmt: skip
        self.kv_format = kv_format
        self.budget = None if memory is None else MemoryBudget(memory, states)
        self.tiers = None if offload is None else CacheTiers(offload)
        excluded = dict(num_blocks=num_blocks, memory=memory, prefix_cache=prefix_cache, offload=offload)
        self._eviction = bind(eviction, states[0], layer_types, kv_format, **excluded)

    def make_empty(self, layer, capacity: int, key: torch.Tensor, value: torch.Tensor) -> PageStore:
        """Pages of `capacity` blocks, on the device of `key`, for keys and values like these [B, H, S, D]."""
        if layer.evicts:
            make_store = functools.partial(_make_pages, self.kv_format, False)
            return EvictingStore(*self._eviction, make_store, layer.state.pool.block_size, key, value)
        store = _make_pages(self.kv_format, layer.has_window, layer.state.pool, capacity, key, value)
        store.exact = layer.exact
        return store

    def fix_pools(self, layer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Sizes the pools by the memory budget, if there is one, when the first keys and values are seen."""
        if self.budget is not None:
            self.budget.fix_pools(functools.partial(self.make_empty, layer), key, value)

    def make(self, layer, key: torch.Tensor, value: torch.Tensor) -> PageStore:
        """The store of a layer that is about to get its first keys and values."""
        self.fix_pools(layer, key, value)
        store = self.make_empty(layer, layer.state.pool.capacity, key, value)
        if self.budget is not None:
            self.budget.check(store, layer.layer_idx)
        return store if self.tiers is None else self.tiers.adopt(store, layer.state)


def _make_pages(kv_format: str, has_window: bool, pool: BlockPool, capacity: int, key, value) -> PageStore:
    if kv_format in GROUPED:
        return GroupStore(pool, capacity, key, value, *GROUPED[kv_format], has_window)
    if kv_format in PER_TOKEN:
        return TokenStore(capacity, pool.block_size, key, value, PER_TOKEN[kv_format])
    return PageStore(capacity, pool.block_size, key, value)
