"""Writes new keys and values into pages, as they are or quantized to int8 or fp8 per token and head."""

import torch
import triton
import triton.language as tl

from .cache_codes import quantize_tokens
from .config import launch_device


@triton.jit
def locate_token(token, slot_mapping, cache_seqlens, block_table, stride_table, page_size, appended, capacity):
    """Sequence and offset of a token in k and v, its page and slot there, and whether it is written at all.

    Its slot is slot_mapping[token], or position cache_seqlens[sequence] + offset of the sequence's block table (None:
    page `sequence`), where token = sequence * appended + offset. Nothing is written for a negative slot, length or
    page, or beyond `capacity` (slots of the cache, or positions of the sequence).
    """
    if slot_mapping is not None:
        sequence = token * 0
        offset = token
        slot = tl.load(slot_mapping + token).to(tl.int64)
        page = slot // page_size
        position = slot % page_size
        write = (slot >= 0) & (slot < capacity)
    else:
        sequence = token // appended
        offset = token % appended
        length = tl.load(cache_seqlens + sequence)
        index = length + offset
        write = (length >= 0) & (index < capacity)
        page = sequence
        if block_table is not None:
            entry = block_table + sequence * stride_table + index // page_size
            page = tl.load(entry, mask=write, other=-1).to(tl.int64)
            write = write & (page >= 0)
        position = index % page_size
    return sequence, offset, page, position, write


@triton.jit(do_not_specialize=["heads", "page_size", "appended", "capacity"])
def write_kernel(
    k, v, k_cache, v_cache, slot_mapping, cache_seqlens, block_table,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_kcb, stride_kct, stride_kch, stride_vcb,
    stride_vct, stride_vch, stride_table,
    heads, page_size, appended, capacity,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes BLOCK_H heads of one token as they are."""
    token = tl.program_id(0).to(tl.int64)
    sequence, offset, page, position, write = locate_token(
        token, slot_mapping, cache_seqlens, block_table, stride_table, page_size, appended, capacity
    )
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    there = (head < heads) & write
    column = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (column < HEAD_DIM)[None, :]
    source = k + sequence * stride_kb + offset * stride_kt + head[:, None] * stride_kh + column[None, :]
    target = k_cache + page * stride_kcb + position * stride_kct + head[:, None] * stride_kch + column[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    column = tl.arange(0, BLOCK_DV)
    inside = there[:, None] & (column < VALUE_DIM)[None, :]
    source = v + sequence * stride_vb + offset * stride_vt + head[:, None] * stride_vh + column[None, :]
    target = v_cache + page * stride_vcb + position * stride_vct + head[:, None] * stride_vch + column[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["heads", "page_size", "appended", "capacity"])
def write_quantized_kernel(
    x, cache, scale, slot_mapping, cache_seqlens, block_table,
    stride_xb, stride_xt, stride_xh, stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, stride_table,
    heads, page_size, appended, capacity,
    IS_FLOAT: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Writes BLOCK_H heads of one token of the keys or the values, as codes and a scale for each head."""
    token = tl.program_id(0).to(tl.int64)
    sequence, offset, page, position, write = locate_token(
        token, slot_mapping, cache_seqlens, block_table, stride_table, page_size, appended, capacity
    )
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    there = (head < heads) & write
    column = tl.arange(0, BLOCK_DIM)
    inside = there[:, None] & (column < DIM)[None, :]
    source = x + sequence * stride_xb + offset * stride_xt + head[:, None] * stride_xh + column[None, :]
    codes, scales = quantize_tokens(tl.load(source, mask=inside, other=0.0).to(tl.float32), IS_FLOAT)
    target = cache + page * stride_cb + position * stride_ct + head[:, None] * stride_ch + column[None, :]
    tl.store(target, codes, mask=inside)
    tl.store(scale + page * stride_sb + position * stride_st + head * stride_sh, scales, mask=there)


def write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    slot_mapping: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    ring: bool = False,
) -> None:  # fmt: skip
    """Launches a kernel on checked arguments: k [T, Hk, D] with slot_mapping, or [B, Sn, Hk, D] with cache_seqlens.

    With scales (float16 [num_blocks, block_size, Hk]) the caches are int8 or fp8 pages. ring: k_cache is [B, R, Hk, D],
    and token t of sequence b goes to slot t % R of k_cache[b].
    """
    if k.numel() == 0:
        return
    by_slot = slot_mapping is not None
    heads, page_size = k.shape[-2], k_cache.shape[1]
    capacity = (k_cache.shape[0] if by_slot else 1 if block_table is None else block_table.shape[1]) * page_size
    where = (slot_mapping, cache_seqlens, block_table)
    sizes = (
        block_table.stride(0) if block_table is not None else 0,
        heads,
        page_size,
        1 if by_slot else k.shape[1],
        2**31 - 1 if ring else capacity,
    )
    tokens = k.shape[:-2].numel()
    strides_k, strides_v = ((0, *x.stride()[:2]) if by_slot else x.stride()[:3] for x in (k, v))
    block_k, block_v = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (k, v))
    block_h = min(triton.next_power_of_2(heads), max(1, 2048 // max(block_k, block_v)))
    grid = (tokens, triton.cdiv(heads, block_h))
    with launch_device(k):
        if k_scale is None:
            write_kernel[grid](
                k, v, k_cache, v_cache, *where, *strides_k, *strides_v,
                *k_cache.stride()[:3], *v_cache.stride()[:3],
                *sizes,
                HEAD_DIM=k.shape[-1], VALUE_DIM=v.shape[-1], BLOCK_H=block_h, BLOCK_D=block_k, BLOCK_DV=block_v,
                num_warps=4,
            )  # fmt: skip
            return
        for x, cache, scale, strides, block in (
            (k, k_cache, k_scale, strides_k, block_k),
            (v, v_cache, v_scale, strides_v, block_v),
        ):
            is_float = cache.dtype != torch.int8
            write_quantized_kernel[grid](
                x, cache.view(torch.uint8) if is_float else cache, scale, *where, *strides,
                *cache.stride()[:3], *scale.stride(),
                *sizes,
                IS_FLOAT=is_float, DIM=x.shape[-1], BLOCK_H=block_h, BLOCK_DIM=block, num_warps=4,
            )  # fmt: skip
