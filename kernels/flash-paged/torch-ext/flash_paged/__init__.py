"""Attention over contiguous, packed and paged keys and values, in Triton (see CARD.md)."""

from .backward_interface import flash_attn_backward
from .cache_interface import copy_blocks, gather_cache, quantize_and_cache, reshape_and_cache
from .decode_combine import counters_in
from .interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .quantized_reference import (
    copy_blocks_reference,
    gather_cache_reference,
    quantize_and_cache_reference,
    reshape_and_cache_reference,
)
from .reference import (
    flash_attn_backward_reference,
    flash_attn_func_reference,
    flash_attn_varlen_func_reference,
    flash_attn_with_kvcache_reference,
    rotate_reference,
)


__all__ = [
    "copy_blocks",
    "copy_blocks_reference",
    "counters_in",
    "flash_attn_backward",
    "flash_attn_backward_reference",
    "flash_attn_func",
    "flash_attn_func_reference",
    "flash_attn_varlen_func",
    "flash_attn_varlen_func_reference",
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache_reference",
    "gather_cache",
    "gather_cache_reference",
    "quantize_and_cache",
    "quantize_and_cache_reference",
    "reshape_and_cache",
    "reshape_and_cache_reference",
    "rotate_reference",
]
