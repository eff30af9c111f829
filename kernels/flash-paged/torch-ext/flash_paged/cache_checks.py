"""Checks of caches, and of the scales and rings of quantized ones."""

import torch

from .checks import DTYPES, check_integers, check_tensor
from .kv_formats import QuantizedKV


def check_cache(k_cache, v_cache, dtype: torch.dtype | None, like: torch.Tensor) -> None:
    """Checks that k_cache and v_cache are pages [num_blocks, block_size, Hk, D or Dv] of one dtype: `dtype`, or a
    quantized one."""
    allowed = f"{dtype or 'float16, bfloat16 or float32'}, or int8, float8_e4m3fn or uint8 for quantized pages"
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        quantized = getattr(tensor, "dtype", None) in (torch.int8, torch.float8_e4m3fn, torch.uint8)
        if isinstance(tensor, torch.Tensor) and not quantized and tensor.dtype not in ((dtype,) if dtype else DTYPES):
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed are {allowed}")
        check_tensor(name, tensor, 4, like, dtype=getattr(k_cache, "dtype", None))
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: all but the last must agree"
        )


def _half(name: str, tensor, shape: tuple, like: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a float16 tensor for a cache of {like.dtype}, got {type(tensor).__name__}")
    if tensor.dtype != torch.float16:
        raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is torch.float16")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} beside pages {tuple(like.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device} as the cache")
    if len(shape) == 4 and tensor.stride(-1) != 1 and shape[-1] != 1:
        raise ValueError(f"the last dimension of {name} has stride {tensor.stride(-1)}: it must be contiguous")


def _same_strides(**tensors: torch.Tensor) -> None:
    (name, first), (other, second) = tensors.items()
    if first.stride() != second.stride():
        raise ValueError(f"{other} has strides {second.stride()}, expected those of {name}, {first.stride()}")


def _check_words(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        size = cache.shape[-1]
        if size % 4 or any(stride % 4 for stride in cache.stride()[:3]) or cache.data_ptr() % 4:
            raise ValueError(
                f"{name} has {size} bytes of codes a head with strides {cache.stride()}: sizes, strides and addresses "
                "must be multiples of 4, so that codes are read 4 bytes at a time"
            )


def check_quantized(
    k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int, value_dim: int | None = None, k_scale=None,
    v_scale=None, k_min=None, v_min=None,
) -> QuantizedKV | None:  # fmt: skip
    """The quantized format of checked pages, None for full precision. head_dim: channels of the keys."""
    present = [
        n for n, t in (("k_scale", k_scale), ("v_scale", v_scale), ("k_min", k_min), ("v_min", v_min)) if t is not None
    ]
    if k_cache.dtype in DTYPES:
        if present:
            raise ValueError(f"{present[0]} is given for a cache of {k_cache.dtype}, which has no scales")
        return None
    if k_cache.dtype != torch.uint8:
        if "k_min" in present or "v_min" in present:
            raise ValueError(f"k_min and v_min are given for a cache of {k_cache.dtype}: only int4 and int2 have them")
        _half("k_scale", k_scale, tuple(k_cache.shape[:3]), k_cache)
        _half("v_scale", v_scale, tuple(k_cache.shape[:3]), v_cache)
        _same_strides(k_scale=k_scale, v_scale=v_scale)
        _check_words(k_cache, v_cache)
        return QuantizedKV(8, k_cache.dtype != torch.int8, k_scale, v_scale)

    for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            given = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(
                f"{name} must be a float16 tensor with 4 dimensions for a cache of torch.uint8, got {given}"
            )
    blocks, block_size, heads, packed = k_cache.shape
    parts = head_dim // packed if packed else 0
    if parts not in (2, 4) or parts * packed != head_dim:
        raise ValueError(
            f"k_cache has {packed} bytes a head: allowed are {head_dim} / 2 (int4) or {head_dim} / 4 (int2) for head "
            f"dim {head_dim}"
        )
    if value_dim is not None and parts * v_cache.shape[-1] != value_dim:
        raise ValueError(
            f"v_cache has {v_cache.shape[-1]} bytes a head: expected {value_dim} / {parts}, as many bits as the keys"
        )
    value_dim = parts * v_cache.shape[-1]
    _check_words(k_cache, v_cache)
    groups, channel_groups = k_scale.shape[1], v_scale.shape[-1]
    if groups == 0 or block_size % groups:
        raise ValueError(f"k_scale has {groups} groups in a block of {block_size} tokens: they must divide it")
    if channel_groups == 0 or value_dim % channel_groups:
        raise ValueError(f"v_scale has {channel_groups} channel groups: they must divide the {value_dim} channels")
    for name, tensor in (("k_scale", k_scale), ("k_min", k_min)):
        _half(name, tensor, (blocks, groups, heads, head_dim), k_cache)
    for name, tensor in (("v_scale", v_scale), ("v_min", v_min)):
        _half(name, tensor, (blocks, block_size, heads, channel_groups), v_cache)
    _same_strides(k_scale=k_scale, k_min=k_min)
    _same_strides(v_scale=v_scale, v_min=v_min)
    return QuantizedKV(8 // parts, False, k_scale, v_scale, k_min, v_min)


def check_tails(
    kv: QuantizedKV | None, k_cache, v_cache, batch: int, dtype, k_tail, v_tail, quantized_seqlens, needed: bool
) -> QuantizedKV | None:
    """`kv` with the rings of its sequences, which only int4 and int2 caches have.

    needed: whether these must have them. dtype: of the rings, None for any.
    """
    tails = {"k_tail": k_tail, "v_tail": v_tail, "quantized_seqlens": quantized_seqlens}
    given = [name for name, tensor in tails.items() if tensor is not None]
    if kv is None or kv.bits == 8:
        if given:
            raise ValueError(
                f"{given[0]} is given for a cache of {k_cache.dtype}: only int4 and int2 caches have tails"
            )
        return kv
    if not given and not needed:
        return kv
    if len(given) < 3:
        missing = next(name for name in tails if name not in given)
        raise ValueError(f"{missing} is missing: int4 and int2 caches need k_tail, v_tail and quantized_seqlens")
    block_size, heads = k_cache.shape[1:3]
    parts, group = 8 // kv.bits, block_size // kv.k_scale.shape[1]
    for name, tensor, cache in (("k_tail", k_tail, k_cache), ("v_tail", v_tail, v_cache)):
        check_tensor(name, tensor, 4, k_cache, dtype=dtype or getattr(k_tail, "dtype", None))
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed are float16, bfloat16 and float32")
        if name == "k_tail" and (tensor.shape[1] == 0 or tensor.shape[1] % group):
            raise ValueError(
                f"k_tail has room for {tensor.shape[1]} tokens: allowed are multiples of the group, {group}"
            )
        expected = (batch, k_tail.shape[1], heads, parts * cache.shape[-1])
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    check_integers("quantized_seqlens", quantized_seqlens, 1, k_cache, length=batch)
    return kv._replace(k_tail=k_tail, v_tail=v_tail, quantized_seqlens=quantized_seqlens)
