"""What a `PagedCache` allocates for a model on the meta device, by the cache's own bookkeeping."""

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.paged_layer import PagedLayer


_MOST_SEQUENCES = 16  # that the bookkeeping runs for: the pool of a larger batch is larger in proportion


class PageBytes:
    """The bytes of a `PagedCache` for a batch.

    Args:
        keys: layer -> (heads, key dim, value dim) of its keys and values, which have `dtype`.
    """

    def __init__(self, cache: PagedCache, keys: dict[int, tuple[int, int, int]], dtype: torch.dtype, batch_size: int):
        self.cache, self.batch = cache, min(batch_size, _MOST_SEQUENCES)
        self.scale = batch_size / self.batch
        self.layers = []  # (state, bytes of a block, bytes of the full-precision rings of all sequences)
        for layer in cache.layers:
            if isinstance(layer, PagedLayer) and layer.layer_idx in keys:
                heads, *dims = keys[layer.layer_idx]
                like = (torch.empty(self.batch, heads, 1, dim, dtype=dtype, device="meta") for dim in dims)
                store = layer.make_store(1, *like)
                self.layers.append((layer.state, store.nbytes, sum(ring.nbytes for ring in store.rows.values())))

    @property
    def token_bytes(self) -> float:
        return sum(block for _, block, _ in self.layers) / self.cache.block_size

    def written_bytes(self, length: int) -> float:
        """Bytes that prompts of `length` tokens write, those behind windows too; rings count whole."""
        rings = sum(rings for _, _, rings in self.layers)
        return (self.batch * length * self.token_bytes + rings) * self.scale

    def read_bytes(self, length: float) -> float:
        """Bytes that a new token's attention reads over all sequences of `length` tokens; rings count whole."""
        total = 0.0
        for state, block, rings in self.layers:
            seen = length if state.window is None else min(length, state.window)
            total += self.batch * seen * block / self.cache.block_size + rings
        return total * self.scale

    def most_bytes(self, prompt_tokens: int, new_tokens: int) -> int:
        """The most bytes allocated while the cache grows from the prompts to the last stored token."""
        size, end = self.cache.block_size, prompt_tokens + new_tokens - 1
        self.cache.state.plan_tokens(self.batch, prompt_tokens, None)
        most, length = self._allocated(), prompt_tokens
        while length < end:
            width = min(size, end - length)
            self.cache.state.plan_tokens(self.batch, width, None)
            length += width
            most = max(most, self._allocated())
        return round(most * self.scale)

    def _allocated(self) -> int:
        return sum(state.pool.capacity * block + rings for state, block, rings in self.layers)
