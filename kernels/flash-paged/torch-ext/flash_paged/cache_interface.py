"""Writes, quantizes, copies and gathers paged caches: functions that check their arguments and launch a kernel.

k_cache [num_blocks, block_size, Hk, D], v_cache [num_blocks, block_size, Hk, Dv]: pages in float16, bfloat16 or
float32, or quantized as kv_formats.py says, with the scales that belong to them. Strided views are fine, the last
dimension contiguous. Errors and debug mode as in interface.py.
"""

import torch

from .cache_checks import check_cache, check_quantized, check_tails
from .cache_copy import copy
from .cache_gather import gather
from .cache_quantize import quantize_groups
from .cache_write import write
from .checks import DTYPES, check_device, check_integers, check_no_grad, check_tensor
from .debug_checks import check_copies, check_cumulative, check_numbers
from .interface import check_new


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes k [T, Hk, D] and v [T, Hk, Dv] in place into pages, quantized per token and head if these are int8 or fp8.

    slot_mapping: int64 [T], token t goes to slot block * block_size + offset; a negative slot, or one beyond the cache,
    is skipped. k_scale, v_scale: float16 [num_blocks, block_size, Hk], of int8 and float8_e4m3fn caches.
    """
    check_device(k)
    check_tensor("k", k, 3, k)
    check_cache(k_cache, v_cache, k.dtype, k)
    if k_cache.dtype == torch.uint8:
        raise TypeError("k_cache has dtype torch.uint8: int4 and int2 pages are written by quantize_and_cache")
    check_quantized(k_cache, v_cache, k.shape[-1], None, k_scale, v_scale)
    check_new(k, k, v, k_cache, v_cache, 3)
    check_integers("slot_mapping", slot_mapping, 1, k, torch.int64, length=k.shape[0])
    check_numbers("slot_mapping", slot_mapping, k_cache.shape[0] * k_cache.shape[1], "slots of the cache")
    write(k, v, k_cache, v_cache, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)


def quantize_and_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor,
    k_min: torch.Tensor, v_scale: torch.Tensor, v_min: torch.Tensor, group_mapping: torch.Tensor,
) -> None:  # fmt: skip
    """Writes whole groups of tokens k [n, G, Hk, D] and v [n, G, Hk, Dv] in place into int4 or int2 pages (uint8), with
    their scales and minima. The keys of a group share them per channel, the values of a token per head and channel
    group (https://arxiv.org/abs/2402.02750).

    group_mapping: int64 [n], group i goes to group slot block * (block_size / G) + its number in the block; a negative
    slot, or one beyond the cache, is skipped.
    """
    check_device(k)
    check_tensor("k", k, 4, k)
    check_tensor("v", v, 4, k)
    check_no_grad(k, v)
    check_tensor("k_cache", k_cache, 4, k, dtype=torch.uint8)
    check_cache(k_cache, v_cache, None, k)
    check_quantized(k_cache, v_cache, k.shape[-1], v.shape[-1], k_scale, v_scale, k_min, v_min)
    group, heads = k_cache.shape[1] // k_scale.shape[1], k_cache.shape[2]
    if k.shape[1:3] != (group, heads) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected groups of {group} tokens and {heads} "
            "heads, as many in both"
        )
    check_integers("group_mapping", group_mapping, 1, k, torch.int64, length=k.shape[0])
    check_numbers("group_mapping", group_mapping, k_scale.shape[0] * k_scale.shape[1], "group slots of the cache")
    quantize_groups(k, v, k_cache, v_cache, k_scale, k_min, v_scale, v_min, group_mapping)


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, mapping: torch.Tensor, *scales: torch.Tensor) -> None:
    """Copies whole blocks in place, in k_cache, v_cache and all of `scales` (whatever else has one entry a block).

    mapping: int64 [n, 2], pairs of source and destination block; a pair with a block outside the cache is skipped. No
    block may be written twice, or be read and written: the copies run side by side.
    """
    check_device(k_cache)
    check_cache(k_cache, v_cache, None, k_cache)
    for position, tensor in enumerate(scales):
        if not isinstance(tensor, torch.Tensor) or not 3 <= tensor.dim() <= 4 or tensor.shape[0] != k_cache.shape[0]:
            given = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(
                f"scales[{position}] has {given}: expected 3 or 4 dimensions, the first {k_cache.shape[0]}"
            )
        if tensor.device != k_cache.device:
            raise ValueError(f"scales[{position}] is on {tensor.device}, expected {k_cache.device} as k_cache")
        if tensor.dim() == 4 and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"the last dimension of scales[{position}] has stride {tensor.stride(-1)}: it must be contiguous"
            )
    check_integers("mapping", mapping, 2, k_cache, torch.int64)
    if mapping.shape[1] != 2:
        raise ValueError(f"mapping has shape {tuple(mapping.shape)}, expected pairs [n, 2]")
    check_copies(mapping, k_cache.shape[0])
    copy([k_cache, v_cache, *scales], mapping)


def gather_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_k: torch.Tensor,
    dtype: torch.dtype, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_min: torch.Tensor | None = None, v_min: torch.Tensor | None = None, k_tail: torch.Tensor | None = None,
    v_tail: torch.Tensor | None = None, quantized_seqlens: torch.Tensor | None = None, num_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The tokens of all sequences end to end, dequantized: k [num_tokens, Hk, D] and v [num_tokens, Hk, Dv] of `dtype`.

    block_table: int32 [B, max_blocks]; tokens in pages named -1 become 0.
    cu_seqlens_k: int32 [B + 1], sequence b goes to tokens cu_seqlens_k[b] to cu_seqlens_k[b + 1] of the result. Scales,
    minima, tails and quantized_seqlens as in `flash_attn_with_kvcache`; tails may be absent: then all is quantized.
    num_tokens: cu_seqlens_k[-1], or more (the rest is not written); None reads it, which waits for the GPU.
    """
    check_device(k_cache)
    check_cache(k_cache, v_cache, None, k_cache)
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}: allowed are float16, bfloat16 and float32")
    packed = k_cache.dtype == torch.uint8 and isinstance(k_scale, torch.Tensor) and k_scale.dim() == 4
    head_dim = k_scale.shape[-1] if packed else k_cache.shape[-1]
    value_dim = getattr(v_tail, "shape", (None,))[-1]
    quantized = check_quantized(k_cache, v_cache, head_dim, value_dim, k_scale, v_scale, k_min, v_min)
    check_integers("block_table", block_table, 2, k_cache)
    batch = block_table.shape[0]
    quantized = check_tails(quantized, k_cache, v_cache, batch, None, k_tail, v_tail, quantized_seqlens, needed=False)
    check_integers("cu_seqlens_k", cu_seqlens_k, 1, k_cache, length=batch + 1)
    check_numbers("block_table", block_table, k_cache.shape[0], "blocks of the cache")
    room = block_table.shape[1] * k_cache.shape[1] + (0 if k_tail is None else k_tail.shape[1])
    check_cumulative("cu_seqlens_k", cu_seqlens_k, longest=room)
    if num_tokens is None:
        num_tokens = int(cu_seqlens_k[-1])
    return gather(k_cache, v_cache, block_table, num_tokens, dtype, quantized, cu_seqlens_k=cu_seqlens_k)
