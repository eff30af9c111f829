"""Pools sized by bytes: `PagedCache(config, memory="2GB")`."""

import torch

from hf_efficient.byte_sizes import parse_bytes  # noqa: F401
from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.stores.full_precision import PageStore


MOST_BLOCKS = 1 << 24  # of a pool: the bookkeeping of a free one takes some 50 bytes of host memory


def check_pool_size(num_blocks: int | None, memory: int | str | None) -> None:
    """Raises ValueError when both are given, or when `num_blocks` is no integer from 1 to `MOST_BLOCKS`."""
    if num_blocks is not None and memory is not None:
        raise ValueError(f"num_blocks={num_blocks} and memory={memory!r}: give one of them")
    if num_blocks is not None and (isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1):
        raise ValueError(f"num_blocks={num_blocks!r}: must be a positive integer")
    if num_blocks is not None and num_blocks > MOST_BLOCKS:
        raise ValueError(f"num_blocks={num_blocks}: must be at most {MOST_BLOCKS}")


def blocks_in(name: str, size: int | str, nbytes: int, block_bytes: int) -> int:
    """How many blocks of `block_bytes` fit into `nbytes`, which the argument `name` gave as `size`. Raises ValueError
    for more than `MOST_BLOCKS`."""
    number = nbytes // block_bytes
    if number > MOST_BLOCKS:
        raise ValueError(
            f"{name}={size!r} holds {number} blocks of {block_bytes} bytes: must be at most "
            f"{MOST_BLOCKS * block_bytes} bytes, {MOST_BLOCKS} blocks"
        )
    return number


def bytes_per_block(store: PageStore) -> int:
    """Bytes that one block takes in the pages of `store`, scales and zero-points included."""
    return store.nbytes // store.capacity


class MemoryBudget:
    """Fixes the size of the pools at the first forward, which shows dtype and heads.

    size: bytes for the pages of all layers together, int or str (`parse_bytes`). states: of every layer that stores
    keys and values; all get equally many blocks.
    """

    def __init__(self, size: int | str, states: list[CacheState]):
        self.size = size
        self.bytes = parse_bytes("memory", size)
        self.states = states
        self.block_bytes: int | None = None  # of one layer

    def fix_pools(self, make_store, key: torch.Tensor, value: torch.Tensor) -> None:
        """Gives the empty pools as many blocks as the budget holds, unless they have them already.

        make_store: (capacity, key, value) -> `PageStore`. key, value: the first ones [B, H, S, D].

        Raises ValueError, with nothing changed, when the budget does not hold one block, or holds too many.
        """
        if self.block_bytes is not None:
            return
        block_size = self.states[0].pool.block_size
        like = (new[:, :, :1].to("meta", value.dtype) for new in (key, value))
        block_bytes = bytes_per_block(make_store(1, *like))
        number = blocks_in("memory", self.size, self.bytes, block_bytes * len(self.states))
        if number == 0:
            raise ValueError(
                f"PagedCache(memory={self.size!r}) holds not one block: {block_size} tokens in {len(self.states)} "
                f"layers take {block_bytes * len(self.states)} bytes. Give that much or more."
            )
        self.block_bytes = block_bytes
        for state in dict.fromkeys(self.states):
            state.pool.num_blocks = number
            state.pool.reset()

    def check(self, store: PageStore, layer_idx: int) -> None:
        """Raises ValueError when a block of this layer takes more bytes than one of the first layer."""
        if bytes_per_block(store) > self.block_bytes:
            raise ValueError(
                f"PagedCache(memory={self.size!r}): a block takes {bytes_per_block(store)} bytes in layer {layer_idx} "
                f"and {self.block_bytes} in the first. Where layers differ, give num_blocks instead."
            )

    def forget(self) -> None:
        """Lets the next forward, of an empty cache, fix the pools anew."""
        self.block_bytes = None
        for state in dict.fromkeys(self.states):
            state.pool.num_blocks = None
            state.pool.reset()
