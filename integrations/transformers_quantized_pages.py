"""Quantized pages for transformers' continuous batching, as of transformers 5.19.

transformers keeps one tensor of bytes, which the allocators of its registry `ATTN_TYPE_TO_ALLOCATOR` lay out as pages.
The allocators registered here are its own, except while a cache with a format is built: then a page holds codes and
their scales, or what `transformers_grouped_pages` says. The scheduler, the count of bytes, prefix sharing, forks and
offload work on it as on any other.
"""

from collections.abc import Callable

import torch
from transformers.generation.continuous_batching import cache, cache_allocators

from hf_efficient.integrations.transformers_evicting_pages import Evicting, EvictingFullAllocator
from hf_efficient.integrations.transformers_grouped_pages import GroupedFullAllocator
from hf_efficient.integrations.transformers_paged_formats import CODES, POLICY
from hf_efficient.kernels.attention import api


_ALIGNMENT = 16  # bytes, of the pages


class _QuantizedPages:
    """For an allocator: pages of codes and scales. Slots are block * tokens_per_page + offset, whatever the layer, and
    block tables name blocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.codes = CODES.get()
        self.block_physical_stride = self.tokens_per_page

    @classmethod
    def get_bytes_per_page(cls, num_key_value_heads: int, head_dim: int, cache_dtype, page_size: int) -> int:
        size = 2 * num_key_value_heads * (head_dim + torch.float16.itemsize) * page_size
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool):
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        tokens = self.tokens_per_page, self.num_key_value_heads
        code_bytes, scale_bytes = (self.tokens_per_page * self.num_key_value_heads * n for n in (self.head_dim, 2))
        self._pages, self._scales = {}, {}
        for index, layer_idx in enumerate(self.layer_indices):
            page = self._copy_view[:, index * self.bytes_per_page :]
            codes, scales = page[:, : 2 * code_bytes], page[:, 2 * code_bytes : 2 * (code_bytes + scale_bytes)]
            codes = codes.view(self.codes).unflatten(1, (2, *tokens, self.head_dim))
            scales = scales.view(torch.float16).unflatten(1, (2, *tokens))
            self._pages[layer_idx] = codes[:, 0], codes[:, 1]
            self._scales[layer_idx] = dict(k_scale=scales[:, 0], v_scale=scales[:, 1])

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of the keys and of the values [blocks, tokens_per_page, Hk, D]."""
        return self._pages[layer_idx]

    def scales(self, layer_idx: int) -> dict[str, torch.Tensor]:
        """k_scale and v_scale, float16 [blocks, tokens_per_page, Hk]."""
        return self._scales[layer_idx]

    def update(self, key_states, value_states, layer_idx: int, read_index, write_index):
        """Writes the new [T, Hk, D] and returns them: flash_paged reads tokens of the cache from the pages."""
        api.reshape_and_cache(key_states, value_states, *self._pages[layer_idx], write_index, **self._scales[layer_idx])
        return key_states, value_states


class QuantizedFullAllocator(_QuantizedPages, cache_allocators.FullAttentionCacheAllocator):
    """Layers that attend to everything."""


class QuantizedSlidingAllocator(_QuantizedPages, cache_allocators.SlidingAttentionCacheAllocator):
    """Layers with a sliding window, whose tokens lie in rings."""

    def update(self, key_states, value_states, layer_idx: int, read_index, write_index):
        """Returns what `read_index` names: tokens of the ring, and the new ones for sentinels. Read before new tokens
        overwrite old ones. [tokens, Hk, D]"""
        results = []
        if read_index.numel():
            is_new = (read_index == self.sentinel_index)[:, None, None]
            place = read_index // self.tokens_per_page, read_index % self.tokens_per_page
            scales = self._scales[layer_idx].values()
            for pages, scale, new in zip(self._pages[layer_idx], scales, (key_states, value_states)):
                codes = pages.view(torch.uint8)[place].view(pages.dtype)  # float8 cannot be indexed
                old = (codes.float() * scale[place].float()[..., None]).to(new.dtype)
                results.append(old.masked_scatter_(is_new, new))
        new = super().update(key_states, value_states, layer_idx, read_index, write_index)
        return tuple(results) or new


class EvictingQuantizedAllocator(Evicting, QuantizedFullAllocator):
    """Codes of 8 bits, of requests that lose tokens."""


def _full() -> type:
    codes = CODES.get()
    if isinstance(codes, int):
        return GroupedFullAllocator
    if POLICY.get() is not None:
        return EvictingFullAllocator if codes is None else EvictingQuantizedAllocator
    return cache_allocators.FullAttentionCacheAllocator if codes is None else QuantizedFullAllocator


def _sliding() -> type:
    codes = CODES.get()
    if isinstance(codes, int) or POLICY.get() is not None:
        given = f"kv_format='int{codes}'" if isinstance(codes, int) else "eviction"
        raise ValueError(f"{given} in continuous batching: the model has layers with a sliding window")
    return cache_allocators.SlidingAttentionCacheAllocator if codes is None else QuantizedSlidingAllocator


def _choice(plain: type, chosen: Callable[[], type]) -> type:
    """Stands in for the allocator `plain`, and makes what the cache that is being built needs."""

    class Choice(plain):
        def __new__(cls, *args, **kwargs):
            return chosen()(*args, **kwargs)

        @classmethod
        def get_bytes_per_page(cls, *args) -> int:
            return chosen().get_bytes_per_page(*args)

    return Choice


def register() -> None:
    """Puts these in the place of transformers' own. Idempotent."""
    if cache.FullAttentionCacheAllocator is not cache_allocators.FullAttentionCacheAllocator:
        return
    full = _choice(cache_allocators.FullAttentionCacheAllocator, _full)
    sliding = _choice(cache_allocators.SlidingAttentionCacheAllocator, _sliding)
    cache.ATTN_TYPE_TO_ALLOCATOR.update({full.layer_type: full, sliding.layer_type: sliding})
    cache.FullAttentionCacheAllocator = full  # whose bytes per page count `num_blocks`
