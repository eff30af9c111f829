"""The formats in which a `PagedCache` holds keys and values, by name."""

import torch


KV_FORMATS = ("auto", "int8", "fp8", "int4", "int2")
GROUPED = {"int4": (4, 64), "int2": (2, 32)}  # bits, tokens or channels that share a scale
PER_TOKEN = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def block_size_of(kv_format: str, block_size: int | None) -> int:
    """Tokens of a block: as given, or with None 16 or the group that shares a scale. Raises ValueError for others."""
    if kv_format not in KV_FORMATS:
        raise ValueError(f"kv_format={kv_format!r}: must be one of {', '.join(KV_FORMATS)}")
    if block_size is None:
        return GROUPED[kv_format][1] if kv_format in GROUPED else 16
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
    multiple = 32 // GROUPED[kv_format][0] if kv_format in GROUPED else 1
    if key.shape[3] % multiple or value.shape[3] % multiple:
        raise ValueError(f'{given}: the dims must be multiples of {multiple}; "auto", "int8" and "fp8" take any')
