"""Quantizes whole groups of tokens into int4 or int2 pages: keys per channel over the group, values per token.

The method is KIVI's (https://arxiv.org/abs/2402.02750), the layout that of kv_formats.py.
"""

import torch
import triton
import triton.language as tl

from .cache_codes import group_codes, group_scale
from .config import launch_device
from .kv_formats import KEY_CLIP


_TILE = 2048  # bytes a program packs: more do not fit the registers


@triton.jit
def quantize_keys_kernel(
    k, cache, scale, low, group_mapping,
    stride_kn, stride_kt, stride_kh, stride_cb, stride_ct, stride_ch, stride_sb, stride_sg, stride_sh, stride_lb,
    stride_lg, stride_lh,
    groups, blocks,
    BITS: tl.constexpr, CLIP: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Quantizes one group of TOKENS tokens of one head, BLOCK_W of the WIDTH bytes of a token."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(group_mapping + index)
    page = slot // groups
    group = slot % groups
    if (slot >= 0) & (page < blocks):
        token = tl.arange(0, BLOCK_T)
        byte = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
        inside = (token < TOKENS)[:, None] & (byte < WIDTH)[None, :]
        k += index * stride_kn + head * stride_kh
        scale += page * stride_sb + group * stride_sg + head * stride_sh
        low += page * stride_lb + group * stride_lg + head * stride_lh
        packed = tl.zeros([BLOCK_T, BLOCK_W], tl.int32)
        for part in tl.static_range(8 // BITS):
            channel = part * WIDTH + byte
            x = tl.load(k + token[:, None] * stride_kt + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            least = tl.min(tl.where(inside, x, float("inf")), 0)
            largest = tl.max(tl.where(inside, x, float("-inf")), 0)
            scales, lows = group_scale(least, largest, BITS, CLIP)
            tl.store(scale + channel, scales, mask=byte < WIDTH)
            tl.store(low + channel, lows, mask=byte < WIDTH)
            packed |= group_codes(x, scales[None, :], lows[None, :], BITS) << (part * BITS)
        rows = (group * TOKENS + token) * stride_ct
        tl.store(
            cache + page * stride_cb + head * stride_ch + rows[:, None] + byte[None, :],
            packed.to(tl.uint8),
            mask=inside,
        )


@triton.jit
def quantize_values_kernel(
    v, cache, scale, low, group_mapping,
    stride_vn, stride_vt, stride_vh, stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, stride_lb,
    stride_lt, stride_lh,
    groups, blocks,
    BITS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNEL_GROUPS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Quantizes BLOCK_T of the TOKENS tokens of one group, one head, all WIDTH bytes."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(group_mapping + index)
    page = slot // groups
    if (slot >= 0) & (page < blocks):
        token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
        position = slot % groups * TOKENS + token
        byte = tl.arange(0, BLOCK_W)
        present = token < TOKENS
        inside = present[:, None] & (byte < WIDTH)[None, :]
        v += index * stride_vn + head * stride_vh
        scale += page * stride_sb + head * stride_sh
        low += page * stride_lb + head * stride_lh
        packed = tl.zeros([BLOCK_T, BLOCK_W], tl.int32)
        for channels in tl.static_range(CHANNEL_GROUPS):
            least = tl.full([BLOCK_T], float("inf"), tl.float32)
            largest = tl.full([BLOCK_T], float("-inf"), tl.float32)
            for part in tl.static_range(8 // BITS):
                channel = part * WIDTH + byte
                member = inside & (channel * CHANNEL_GROUPS // (WIDTH * 8 // BITS) == channels)[None, :]
                x = tl.load(v + token[:, None] * stride_vt + channel[None, :], mask=member, other=0.0).to(tl.float32)
                least = tl.minimum(least, tl.min(tl.where(member, x, float("inf")), 1))
                largest = tl.maximum(largest, tl.max(tl.where(member, x, float("-inf")), 1))
            scales, lows = group_scale(least, largest, BITS, 0.0)
            tl.store(scale + position * stride_st + channels, scales, mask=present)
            tl.store(low + position * stride_lt + channels, lows, mask=present)
            for part in tl.static_range(8 // BITS):
                channel = part * WIDTH + byte
                member = inside & (channel * CHANNEL_GROUPS // (WIDTH * 8 // BITS) == channels)[None, :]
                x = tl.load(v + token[:, None] * stride_vt + channel[None, :], mask=member, other=0.0).to(tl.float32)
                codes = group_codes(x, scales[:, None], lows[:, None], BITS)
                packed |= tl.where(member, codes, 0) << (part * BITS)
        rows = cache + page * stride_cb + head * stride_ch + position * stride_ct
        tl.store(rows[:, None] + byte[None, :], packed.to(tl.uint8), mask=inside)


def tiles(tokens: int, k_width: int, v_width: int) -> tuple[int, int]:
    """Tokens of a program of the values, and bytes of a program of the keys."""
    padded = triton.next_power_of_2(tokens)
    block_t = min(padded, max(1, _TILE // triton.next_power_of_2(v_width)))
    return block_t, min(triton.next_power_of_2(k_width), max(8, _TILE // padded))


def quantize_groups(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor,
    k_min: torch.Tensor, v_scale: torch.Tensor, v_min: torch.Tensor, group_mapping: torch.Tensor,
) -> None:  # fmt: skip
    """Launches both kernels on checked arguments."""
    if k.numel() == 0:
        return
    count, tokens, heads, head_dim = k.shape
    bits = 8 * k_cache.shape[-1] // head_dim
    where = {"groups": k_cache.shape[1] // tokens, "blocks": k_cache.shape[0]}
    block_t, block_w = tiles(tokens, k_cache.shape[-1], v_cache.shape[-1])
    with launch_device(k):
        quantize_keys_kernel[(count, heads, triton.cdiv(k_cache.shape[-1], block_w))](
            k, k_cache, k_scale, k_min, group_mapping,
            *k.stride()[:3], *k_cache.stride()[:3], *k_scale.stride()[:3], *k_min.stride()[:3],
            **where,
            BITS=bits, CLIP=KEY_CLIP[bits], TOKENS=tokens, WIDTH=k_cache.shape[-1],
            BLOCK_T=triton.next_power_of_2(tokens), BLOCK_W=block_w,
            num_warps=4,
        )  # fmt: skip
        quantize_values_kernel[(count, heads, triton.cdiv(tokens, block_t))](
            v, v_cache, v_scale, v_min, group_mapping,
            *v.stride()[:3], *v_cache.stride()[:3], *v_scale.stride()[:3], *v_min.stride()[:3],
            **where,
            BITS=bits, TOKENS=tokens, WIDTH=v_cache.shape[-1], CHANNEL_GROUPS=v_scale.shape[-1], BLOCK_T=block_t,
            BLOCK_W=triton.next_power_of_2(v_cache.shape[-1]), num_warps=4,
        )  # fmt: skip
