"""The formats in which a `PagedCache` can hold keys and values, by name."""

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.cache.stores.grouped import GroupStore
from hf_efficient.cache.stores.quantized import TokenStore


KV_FORMATS = ("auto", "int8", "fp8", "int4", "int2")
_GROUPS = {"int4": (4, 64), "int2": (2, 32)}  # bits, group size
_TOKENS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def block_size_of(kv_format: str, block_size: int | None) -> int:
    """Tokens of a block: as given, or with None 16 or the group that shares a scale. Raises ValueError for others."""
    if kv_format not in KV_FORMATS:
        raise ValueError(f"kv_format={kv_format!r}: must be one of {', '.join(KV_FORMATS)}")
    if block_size is None:
        return _GROUPS[kv_format][1] if kv_format in _GROUPS else 16
    if isinstance(block_size, bool) or block_size not in (8, 16, 32, 64, 128, 256):
        raise ValueError(f"block_size={block_size!r}: must be 8, 16, 32, 64, 128 or 256")
    return block_size


def check_form(kv_format: str, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError for keys [B, Hk, S, D] or values [B, Hv, S, Dv] that the format cannot hold."""
    if kv_format == "auto":
        return
    given = (
        f"PagedCache(kv_format={kv_format!r}): keys have {key.shape[1]} heads of dim {key.shape[3]}, values "
        f"{value.shape[1]} of dim {value.shape[3]}"
    )
    if key.shape[1] != value.shape[1]:
        raise ValueError(f'{given}: there must be as many of both; "auto" takes any')
    multiple = 32 // _GROUPS[kv_format][0] if kv_format in _GROUPS else 1
    if key.shape[3] % multiple or value.shape[3] % multiple:
        raise ValueError(f'{given}: the dims must be multiples of {multiple}; "auto", "int8" and "fp8" take any')


def make_store(
    kv_format: str, pool: BlockPool, capacity: int, key: torch.Tensor, value: torch.Tensor, has_window: bool
) -> PageStore:
    """An empty store of `capacity` blocks for keys like `key` [B, Hk, S, D] and values like `value` [B, Hk, S, Dv];
    has_window: whether they are of a layer whose attention sees only what is near."""
    if kv_format in _GROUPS:
        return GroupStore(pool, capacity, key, value, *_GROUPS[kv_format], has_window)
    if kv_format in _TOKENS:
        return TokenStore(capacity, pool.block_size, key, value, _TOKENS[kv_format])
    return PageStore(capacity, pool.block_size, key, value)
