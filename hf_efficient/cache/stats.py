"""What a paged cache holds and costs: `cache.stats()`."""

from dataclasses import dataclass

from hf_efficient.cache.bookkeeping.block_pool import BlockPool


@dataclass(frozen=True)
class CacheStats:
    """Counts over all pools of a cache: one, unless layers have pools of their own.

    blocks_used, blocks_free: blocks that hold tokens, and those that exist and do not.
    blocks_shared: blocks held by more than one sequence; each counts once in `blocks_used`.
    tokens: tokens stored; one that sequences share counts once. tokens + wasted_slots = blocks_used * block_size.
    wasted_slots: slots of used blocks that hold no token.
    bytes_allocated, bytes_used: of the pages of all layers, wherever they lie, and of the blocks in use among them.
    prefix_hit_rate: share of the prompt tokens that the prefix cache had, 0 to 1; None without one.
    """

    blocks_used: int
    blocks_free: int
    blocks_shared: int
    wasted_slots: int
    tokens: int
    bytes_allocated: int
    bytes_used: int
    prefix_hit_rate: float | None = None

    @classmethod
    def of(cls, cache) -> "CacheStats":
        """The counts of a `PagedCache` now."""
        pools: dict[BlockPool, list] = {}
        for layer in cache._paged_layers:
            pools.setdefault(getattr(layer.store, "pool", layer.state.pool), []).append(layer.store)
        used = free = shared = slots = tokens = allocated = in_use = 0
        for pool, stores in pools.items():
            used_here = pool.capacity - pool.num_free
            used += used_here
            free += pool.num_free
            shared += sum(count > 1 for count in pool.ref_count)
            slots += used_here * pool.block_size
            tokens += sum(filled_slots(pool).values())
            for store in stores:
                if store is not None and store.capacity:
                    allocated += store.nbytes
                    in_use += store.nbytes // store.capacity * used_here
        prefix_cache = getattr(cache, "prefix_cache", None)
        rate = None if prefix_cache is None else prefix_cache.hit_rate
        return cls(used, free, shared, slots - tokens, tokens, allocated, in_use, rate)

    def __str__(self) -> str:
        blocks = f"{self.blocks_used} blocks used ({self.blocks_shared} shared), {self.blocks_free} free"
        slots = f"{self.tokens} tokens, {self.wasted_slots} slots wasted"
        text = f"{blocks}; {slots}; {self.bytes_used / 2**20:.1f} of {self.bytes_allocated / 2**20:.1f} MiB used"
        return text if self.prefix_hit_rate is None else f"{text}; prefix hits {self.prefix_hit_rate:.0%}"


def written_bytes(cache) -> int:
    """Bytes of the pages of all layers that were in use since their tensors were made: on a CPU, what they take of its
    memory."""
    stores = [(layer.store, layer.state.pool) for layer in cache._paged_layers if layer.is_initialized]
    return sum(store.nbytes // store.capacity * len(pool.written) for store, pool in stores if store.capacity)


def filled_slots(pool: BlockPool) -> dict[int, int]:
    """Block -> slots of it that hold a token of some sequence."""
    filled: dict[int, int] = {}
    for table, length in zip(pool.tables, pool.lengths):
        for number, block in enumerate(table):
            tokens = min(pool.block_size, length - number * pool.block_size)
            filled[block] = max(filled.get(block, 0), tokens)
    return filled
