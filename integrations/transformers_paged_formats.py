"""Quantized pages for transformers' continuous batching: `generate_batch(continuous_batching_config=...)` with
`kv_format`.

transformers keeps one tensor of bytes, which the allocators of its registry `ATTN_TYPE_TO_ALLOCATOR` lay out as pages.
The allocators registered here are its own, except while a cache with a format is built: then a page holds codes and
their scales. The scheduler, the count of bytes, prefix sharing, forks and offload work on it as on any other.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import transformers
from transformers.generation.continuous_batching import PagedAttentionCache, cache, cache_allocators, continuous_api

from hf_efficient.kernels.attention import api


FORMATS = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_CODES: ContextVar[torch.dtype | None] = ContextVar("codes of the cache that is being built", default=None)
_ALIGNMENT = 16  # bytes, of the pages


@dataclass
class ContinuousBatchingConfig(transformers.ContinuousBatchingConfig):
    """transformers' `ContinuousBatchingConfig` with one more argument, for `generate_batch`, `init_continuous_batching`
    and `continuous_batching_context_manager` of a model with `attn_implementation="flash_paged"`:

        model.generate_batch(prompts,
        continuous_batching_config=hf_efficient.ContinuousBatchingConfig(kv_format="int8"))

    Args:
        kv_format: how keys and values are stored. "auto": in the model's dtype. "int8", "fp8" (float8_e4m3fn): one byte
            a number and one float16 scale a token and head, (D + 2) / 2D of bfloat16's bytes for head dim D: nearly
            twice the tokens in the same memory. `num_blocks` counts blocks of this format. int4 and int2 are for
            `PagedCache` only: they keep the newest tokens of a sequence outside of the pages.

    Keys and values that are read from the pages are rounded. The new ones of sliding-window layers are not, nor those
    of a forward that reads nothing from the cache (whole prompts, not padded for CUDA graphs). So tokens may depend on
    how requests are batched, within what the format rounds.

    Raises ValueError for another format; and when the cache is built, for a model without that attention.
    """

    kv_format: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.kv_format, str) or self.kv_format not in FORMATS:
            raise ValueError(f"kv_format={self.kv_format!r}: must be one of {list(FORMATS)}")


class FormattedCache(PagedAttentionCache):
    """transformers' cache, built with the pages that `continuous_batching_config.kv_format` asks for."""

    def __init__(self, config, continuous_batching_config, *args, **kwargs):
        kv_format = getattr(continuous_batching_config, "kv_format", "auto")
        if kv_format != "auto" and config._attn_implementation not in api.ATTENTION_NAMES:
            raise ValueError(
                f"kv_format={kv_format!r} needs a model with attn_implementation='flash_paged', and this one has "
                f"{config._attn_implementation!r}"
            )
        with _building(FORMATS[kv_format]):
            super().__init__(config, continuous_batching_config, *args, **kwargs)


@contextmanager
def _building(codes: torch.dtype | None):
    token = _CODES.set(codes)
    try:
        yield
    finally:
        _CODES.reset(token)


class _QuantizedPages:
    """For an allocator: pages of codes and scales. Slots are block * tokens_per_page + offset, whatever the layer, and
    block tables name blocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.codes = _CODES.get()
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


def _choice(plain: type, quantized: type) -> type:
    """Stands in for the allocator `plain`, and makes `quantized` ones while a cache with a format is built."""

    class Choice(plain):
        def __new__(cls, *args, **kwargs):
            return (quantized if _CODES.get() else plain)(*args, **kwargs)

        @classmethod
        def get_bytes_per_page(cls, *args) -> int:
            return (quantized if _CODES.get() else plain).get_bytes_per_page(*args)

    return Choice


def register() -> None:
    """Puts these in the place of transformers' own. Idempotent."""
    if continuous_api.PagedAttentionCache is FormattedCache:
        return
    full = _choice(cache_allocators.FullAttentionCacheAllocator, QuantizedFullAllocator)
    sliding = _choice(cache_allocators.SlidingAttentionCacheAllocator, QuantizedSlidingAllocator)
    cache.ATTN_TYPE_TO_ALLOCATOR.update({full.layer_type: full, sliding.layer_type: sliding})
    cache.FullAttentionCacheAllocator = full  # whose bytes per page count `num_blocks`
    continuous_api.PagedAttentionCache = FormattedCache
