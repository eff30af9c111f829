"""int4 and int2 pages for transformers' continuous batching, as of transformers 5.19: an allocator whose blocks hold
the pages of `GroupStore`, and rings for what it does not quantize."""

from math import prod

import torch
from transformers.generation.continuous_batching import cache_allocators

from hf_efficient.cache.request_rings import RequestRings, check, page_layout
from hf_efficient.integrations.transformers_paged_formats import CODES


_ALIGNMENT = 16  # bytes, of a page


class GroupedFullAllocator(cache_allocators.FullAttentionCacheAllocator):
    """Layers that attend to everything. Requests share no blocks, as the tokens at their ends lie in rings.

    rings: the `RequestRings` of the layers.
    """

    supports_block_sharing = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bits = CODES.get()
        check(f"int{self.bits}", self.tokens_per_page, self.head_dim)
        self.block_physical_stride = self.tokens_per_page

    @classmethod
    def get_bytes_per_page(cls, num_key_value_heads: int, head_dim: int, cache_dtype, page_size: int) -> int:
        layout = page_layout(CODES.get(), num_key_value_heads, head_dim, page_size)
        size = sum(dtype.itemsize * prod(shape) for dtype, shape in layout.values())
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool):
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        layout = page_layout(self.bits, self.num_key_value_heads, self.head_dim, self.tokens_per_page)
        self.pages: dict[int, dict[str, torch.Tensor]] = {}
        for index, layer_idx in enumerate(self.layer_indices):
            start, pages = index * self.bytes_per_page, {}
            for name, (dtype, shape) in layout.items():
                size = dtype.itemsize * prod(shape)
                pages[name] = self._copy_view[:, start : start + size].view(dtype).unflatten(1, shape)
                start += size
            self.pages[layer_idx] = pages
        self.rings = RequestRings(self.pages, self.bits, self.cache_dtype, self.num_key_value_heads, self.head_dim)

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of the keys and of the values [blocks, tokens_per_page, Hk, D * bits / 8]."""
        return self.pages[layer_idx]["keys"], self.pages[layer_idx]["values"]

    def scales(self, layer_idx: int) -> dict[str, torch.Tensor]:
        """The arguments of `attend_ragged` with scales and minima."""
        pages = self.pages[layer_idx]
        return dict(
            k_scale=pages["key_scales"], v_scale=pages["value_scales"], k_min=pages["key_minima"],
            v_min=pages["value_minima"],
        )  # fmt: skip

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int):
        self.rings.fork(source_request_id, dest_request_id)
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.rings.drop(request_id)
        super().free_blocks(request_id, no_cache)
