"""What a `PagedCache` allocates for a model that is not there, by its own bookkeeping."""

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.paged_layer import PagedLayer


_ROWS = 16  # of a batch, from which on a pool grows in proportion


class PageBytes:
    """The bytes of a `PagedCache` whose layers get keys and values of the forms `keys` (heads, key dim, value dim)."""

    def __init__(self, cache: PagedCache, keys: dict[int, tuple[int, int, int]], dtype: torch.dtype, batch_size: int):
        self.cache, self.rows, self.scale = cache, min(batch_size, _ROWS), batch_size / min(batch_size, _ROWS)
        self.layers = []  # (state, bytes of a block, bytes of all rows)
        for layer in cache.layers:
            if isinstance(layer, PagedLayer) and layer.layer_idx in keys:
                heads, *dims = keys[layer.layer_idx]
                like = (torch.empty(self.rows, heads, 1, dim, dtype=dtype, device="meta") for dim in dims)
                store = layer.make_store(1, *like)
                self.layers.append((layer.state, store.nbytes, sum(rows.nbytes for rows in store.rows.values())))

    @property
    def token_bytes(self) -> float:
        return sum(block for _, block, _ in self.layers) / self.cache.block_size

    def read_bytes(self, length: float) -> float:
        """Of what a new token attends to, for all rows of `length` tokens; the rings of int4 and int2 count whole."""
        total = 0.0
        for state, block, rings in self.layers:
            seen = length if state.window is None else min(length, state.window)
            total += self.rows * seen * block / self.cache.block_size + rings
        return total * self.scale

    def most_bytes(self, prompt_tokens: int, new_tokens: int) -> int:
        """The most that is allocated while the cache grows from the prompt to the last token that is stored."""
        size, end = self.cache.block_size, prompt_tokens + new_tokens - 1
        self.cache.state.plan_tokens(self.rows, prompt_tokens, None)
        most, length = self._allocated(), prompt_tokens
        while length < end:
            width = min(size, end - length)
            self.cache.state.plan_tokens(self.rows, width, None)
            length += width
            most = max(most, self._allocated())
        return round(most * self.scale)

    def _allocated(self) -> int:
        return sum(state.pool.capacity * block + rings for state, block, rings in self.layers)
