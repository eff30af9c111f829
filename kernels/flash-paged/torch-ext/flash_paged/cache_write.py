"""New keys and values into the pages of a cache."""

import torch
import triton
import triton.language as tl

from .config import launch_device


@triton.jit(do_not_specialize=["heads", "page_size", "appended", "capacity"])
def write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    cache_seqlens,
    block_table,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_kcb,
    stride_kct,
    stride_kch,
    stride_vcb,
    stride_vct,
    stride_vch,
    stride_table,
    heads,
    page_size,
    appended,
    capacity,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One token, BLOCK_H heads. Its slot: slot_mapping[token], or position cache_seqlens[row] + offset of row's block table
    (None: page `row`), where token = row * appended + offset. Nothing is written for a negative slot, length or page, or
    beyond `capacity` (slots of the cache, or positions of the row)."""
    token = tl.program_id(0).to(tl.int64)
    if slot_mapping is not None:
        row = token * 0
        offset = token
        slot = tl.load(slot_mapping + token).to(tl.int64)
        page = slot // page_size
        position = slot % page_size
        write = (slot >= 0) & (slot < capacity)
    else:
        row = token // appended
        offset = token % appended
        length = tl.load(cache_seqlens + row)
        place = length + offset
        write = (length >= 0) & (place < capacity)
        page = row
        if block_table is not None:
            entry = block_table + row * stride_table + place // page_size
            page = tl.load(entry, mask=write, other=-1).to(tl.int64)
            write = write & (page >= 0)
        position = place % page_size
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = (head < heads) & write
    column = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (column < HEAD_DIM)[None, :]
    source = k + row * stride_kb + offset * stride_kt + head[:, None] * stride_kh + column[None, :]
    target = k_cache + page * stride_kcb + position * stride_kct + head[:, None] * stride_kch + column[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    column = tl.arange(0, BLOCK_DV)
    inside = there[:, None] & (column < VALUE_DIM)[None, :]
    source = v + row * stride_vb + offset * stride_vt + head[:, None] * stride_vh + column[None, :]
    target = v_cache + page * stride_vcb + position * stride_vct + head[:, None] * stride_vch + column[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slot_mapping: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Launches `write_kernel` on checked arguments: k [T, Hk, D] with slot_mapping, or [B, Sn, Hk, D] with cache_seqlens."""
    if k.numel() == 0:
        return
    by_slot = slot_mapping is not None
    heads, head_dim, value_dim, page_size = k.shape[-2], k.shape[-1], v.shape[-1], k_cache.shape[1]
    block_d, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    blocks = k_cache.shape[0] if by_slot else (1 if block_table is None else block_table.shape[1])
    capacity = blocks * page_size
    block_h = min(triton.next_power_of_2(heads), max(1, 2048 // max(block_d, block_dv)))
    with launch_device(k):
        write_kernel[(k.shape[:-2].numel(), triton.cdiv(heads, block_h))](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            cache_seqlens,
            block_table,
            *((0, *k.stride()[:2]) if by_slot else k.stride()[:3]),
            *((0, *v.stride()[:2]) if by_slot else v.stride()[:3]),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_table.stride(0) if block_table is not None else 0,
            heads,
            page_size,
            1 if by_slot else k.shape[1],
            capacity,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            num_warps=4,
        )
