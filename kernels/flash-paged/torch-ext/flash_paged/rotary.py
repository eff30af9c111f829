"""Rotates queries and keys (RoPE, https://arxiv.org/abs/2104.09864) and appends keys and values to pages, one
launch."""

import torch
import triton
import triton.language as tl

from .cache_write import locate_token
from .config import launch_device


@triton.jit
def rotate(rows, cos, sin, there, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[H, BLOCK] from row pointers [H]: x * cos + (-second half, first half) * sin; products and sum are rounded to the
    dtype of x, as torch rounds them. cos and sin point to the token's DIM numbers."""
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    other = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)
    mask = there[:, None] & inside[None, :]
    x = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
    partner = tl.load(rows[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.where(column < DIM // 2, -sine, sine)
    straight = (x.to(tl.float32) * cosine[None, :]).to(x.dtype).to(tl.float32)
    turned = (partner * sine[None, :]).to(x.dtype).to(tl.float32)
    return (straight + turned).to(x.dtype)


@triton.jit(do_not_specialize=["heads", "kv_heads", "page_size", "appended", "capacity"])
def rotate_and_write_kernel(
    q, k, v, cos, sin, out, k_cache, v_cache, cache_seqlens, block_table,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_rb,
    stride_rt, stride_kcb, stride_kct, stride_kch, stride_vcb, stride_vct, stride_vch, stride_table,
    heads, kv_heads, page_size, appended, capacity,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of query heads and then of key heads). out is contiguous [B, Sq, Hq, D]."""
    token = tl.program_id(0).to(tl.int64)
    sequence, offset, page, position, write = locate_token(
        token, None, cache_seqlens, block_table, stride_table, page_size, appended, capacity
    )
    table = sequence * stride_rb + offset * stride_rt
    column = tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(heads, BLOCK_H)
    block = tl.program_id(1)
    if block < blocks:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        there = head < heads
        rows = q + sequence * stride_qb + offset * stride_qt + head * stride_qh
        rotated = rotate(rows, cos + table, sin + table, there, HEAD_DIM, BLOCK_D)
        target = out + (token * heads + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, rotated, mask=there[:, None] & (column < HEAD_DIM)[None, :])
    else:
        head = ((block - blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        there = (head < kv_heads) & write
        rows = k + sequence * stride_kb + offset * stride_kt + head * stride_kh
        rotated = rotate(rows, cos + table, sin + table, there, HEAD_DIM, BLOCK_D)
        target = k_cache + page * stride_kcb + position * stride_kct + head[:, None] * stride_kch + column[None, :]
        tl.store(target, rotated, mask=there[:, None] & (column < HEAD_DIM)[None, :])
        channel = tl.arange(0, BLOCK_DV)
        inside = there[:, None] & (channel < VALUE_DIM)[None, :]
        source = v + sequence * stride_vb + offset * stride_vt + head[:, None] * stride_vh + channel[None, :]
        target = v_cache + page * stride_vcb + position * stride_vct + head[:, None] * stride_vch + channel[None, :]
        tl.store(target, tl.load(source, mask=inside), mask=inside)


def check_rotary(cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None) -> None:
    """Checks that cos and sin are [B or 1, Sq, D] in the dtype of q, and that as many keys as queries are new."""
    if k is None or k.shape[1] != q.shape[1]:
        given = "none" if k is None else k.shape[1]
        raise ValueError(f"rotary_cos with {given} new keys for {q.shape[1]} queries: allowed is one for each query")
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        allowed = [(batch, *q.shape[1:2], q.shape[3]) for batch in (q.shape[0], 1)]
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) not in allowed or q.shape[3] % 2:
            raise ValueError(
                f"{name} has shape {tuple(getattr(tensor, 'shape', ()))}: allowed is one of {allowed}, D even"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device or tensor.stride(-1) != 1:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: allowed is {q.dtype} on {q.device}, as q")
        if tensor.stride() != cos.stride():
            raise ValueError(f"{name} has strides {tensor.stride()}, rotary_cos {cos.stride()}: allowed are the same")


def rotate_and_write(q, k, v, cos, sin, k_cache, v_cache, cache_seqlens, block_table) -> torch.Tensor:
    """Launches the kernel on checked arguments of `flash_attn_with_kvcache`, pages as they are. Returns q, rotated."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    batch, queries, heads, dim = q.shape
    kv_heads, page_size = k.shape[2], k_cache.shape[1]
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (k, v))
    block_h = min(triton.next_power_of_2(kv_heads), max(1, 1024 // max(block_d, block_dv)))
    grid = (batch * queries, triton.cdiv(heads, block_h) + triton.cdiv(kv_heads, block_h))
    capacity = (1 if block_table is None else block_table.shape[1]) * page_size
    with launch_device(q):
        rotate_and_write_kernel[grid](
            q, k, v, cos, sin, out, k_cache, v_cache, cache_seqlens, block_table,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            0 if block_table is None else block_table.stride(0),
            heads, kv_heads, page_size, queries, capacity,
            HEAD_DIM=dim, VALUE_DIM=v.shape[-1], BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_DV=block_dv, num_warps=4,
        )  # fmt: skip
    return out
