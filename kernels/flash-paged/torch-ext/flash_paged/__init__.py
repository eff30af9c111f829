"""Attention over contiguous, packed and paged keys and values, in Triton (see CARD.md)."""

from .interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, reshape_and_cache
from .reference import (
    flash_attn_func_reference,
    flash_attn_varlen_func_reference,
    flash_attn_with_kvcache_reference,
    reshape_and_cache_reference,
)


__all__ = [
    "flash_attn_func",
    "flash_attn_func_reference",
    "flash_attn_varlen_func",
    "flash_attn_varlen_func_reference",
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache_reference",
    "reshape_and_cache",
    "reshape_and_cache_reference",
]
