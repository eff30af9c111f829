"""Gathers pages into contiguous keys and values in full precision, whatever the format of the cache."""

import torch
import triton
import triton.language as tl

from .cache_codes import from_e4m3
from .config import launch_device
from .kv_formats import QuantizedKV


_TOKENS = 32  # a program


@triton.jit(do_not_specialize=["capacity", "appended", "page_size", "ring"])
def gather_kernel(
    cache, scale, low, tail, out, block_table, cu_seqlens, cache_seqlens, quantized_seqlens,
    stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, stride_lb, stride_lt, stride_lh, stride_tb,
    stride_tt, stride_th, stride_table,
    page_size, capacity, ring, width, appended,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Gathers BLOCK_T tokens of one sequence and head, of the keys or the values, into contiguous out [tokens, heads,
    DIM].

    Sequence b lies at tokens cu_seqlens[b] to cu_seqlens[b + 1] of out, or has cache_seqlens[b] + appended tokens from
    b * width on. With 4 and 2 bits GROUP tokens (keys) or channels (values) share a scale and minimum. Tokens from
    quantized_seqlens[b] on come from the ring `tail`. Pages named -1, and tokens beyond `capacity`, give 0.
    """
    sequence = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(2).to(tl.int64)
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = tl.load(cu_seqlens + sequence + 1) - first
    else:
        first = sequence * width
        length = tl.load(cache_seqlens + sequence)
        length = tl.minimum(tl.where(length < 0, 0, length + appended), width)
    if tl.program_id(0) * BLOCK_T < length:
        present = token < length
        paged = present & (token < capacity)
        if tail is not None:
            in_tail = present & (token >= tl.load(quantized_seqlens + sequence))
            paged = paged & ~in_tail
            slot = (token % ring).to(tl.int64)
        entry = block_table + sequence * stride_table + token // page_size
        page = tl.load(entry, mask=paged, other=-1).to(tl.int64)
        paged = paged & (page >= 0)
        position = token % page_size
        WIDTH: tl.constexpr = DIM * BITS // 8 if BITS < 8 else DIM
        byte = tl.arange(0, BLOCK_W)
        inside = paged[:, None] & (byte < WIDTH)[None, :]
        rows = cache + page * stride_cb + position * stride_ct + head * stride_ch
        codes = tl.load(rows[:, None] + byte[None, :], mask=inside, other=0.0)
        target = out + ((first + token) * tl.num_programs(2) + head) * DIM
        for part in tl.static_range(DIM // WIDTH):
            channel = part * WIDTH + byte
            if BITS == 16:
                x = codes.to(tl.float32)
            elif BITS == 8:
                scales = tl.load(scale + page * stride_sb + position * stride_st + head * stride_sh, mask=paged)
                x = from_e4m3(codes) if IS_FLOAT else codes.to(tl.float32)
                x = x * tl.where(paged, scales.to(tl.float32), 0.0)[:, None]
            else:
                if KEYS:
                    index = (position // GROUP)[:, None] + channel[None, :] * 0
                    column = channel
                else:
                    index = position[:, None] + channel[None, :] * 0
                    column = channel // GROUP
                scales = scale + page[:, None] * stride_sb + index * stride_st + head * stride_sh + column[None, :]
                lows = low + page[:, None] * stride_lb + index * stride_lt + head * stride_lh + column[None, :]
                x = ((codes >> (part * BITS)) & (2**BITS - 1)).to(tl.float32)
                x = x * tl.load(scales, mask=inside, other=0.0).to(tl.float32)
                x += tl.load(lows, mask=inside, other=0.0).to(tl.float32)
            if tail is not None:
                rows = tail + sequence * stride_tb + slot * stride_tt + head * stride_th
                from_tail = in_tail[:, None] & (byte < WIDTH)[None, :]
                whole = tl.load(rows[:, None] + channel[None, :], mask=from_tail, other=0.0).to(tl.float32)
                x = tl.where(from_tail, whole, x)
            tl.store(
                target[:, None] + channel[None, :],
                x.to(out.dtype.element_ty),
                mask=present[:, None] & (byte < WIDTH)[None, :],
            )


def gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, num_tokens: int, dtype: torch.dtype,
    quantized: QuantizedKV | None, *, cu_seqlens_k: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None, appended: int = 0, width: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launches `gather_kernel` for keys and for values, on checked arguments.

    Sequences lie at cu_seqlens_k, or have cache_seqlens + appended tokens and lie `width` tokens apart. Returns k
    [num_tokens, Hk, D] and v [num_tokens, Hk, Dv] of `dtype`; tokens of no sequence are not written.
    """
    page_size, heads = k_cache.shape[1:3]
    batch, max_blocks = block_table.shape
    kv = quantized or QuantizedKV(16, False, None, None)
    ring = 1 if kv.k_tail is None else kv.k_tail.shape[1]
    capacity = max_blocks * page_size
    longest = width or capacity + (0 if kv.k_tail is None else ring)
    results = []
    for keys, cache, scale, low, tail in (
        (True, k_cache, kv.k_scale, kv.k_min, kv.k_tail),
        (False, v_cache, kv.v_scale, kv.v_min, kv.v_tail),
    ):
        dim = cache.shape[-1] * (8 // kv.bits if kv.bits < 8 else 1)
        out = torch.empty((num_tokens, heads, dim), dtype=dtype, device=cache.device)
        results.append(out)
        if out.numel() == 0 or batch == 0:
            continue
        group = 1
        if kv.bits < 8:
            group = page_size // scale.shape[1] if keys else dim // scale.shape[-1]
        with launch_device(cache):
            gather_kernel[(triton.cdiv(longest, _TOKENS), batch, heads)](
                cache.view(torch.uint8) if kv.is_float else cache, scale, low, tail, out, block_table, cu_seqlens_k,
                cache_seqlens, kv.quantized_seqlens,
                *cache.stride()[:3], *((0, 0, 0) if scale is None else scale.stride()[:3]),
                *((0, 0, 0) if low is None else low.stride()[:3]), *((0, 0, 0) if tail is None else tail.stride()[:3]),
                block_table.stride(0),
                page_size, capacity, ring, width, appended,
                BITS=kv.bits, IS_FLOAT=kv.is_float, KEYS=keys, GROUP=group, DIM=dim, BLOCK_T=_TOKENS,
                BLOCK_W=max(16, triton.next_power_of_2(cache.shape[-1])), num_warps=4,
            )  # fmt: skip
    return tuple(results)


def gather_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    dtype: torch.dtype,
    quantized: QuantizedKV,
    cache_seqlens: torch.Tensor,
    appended: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of `dtype` with all that quantized pages and rings hold, and their block table.

    Sizes follow from shapes alone, so that nothing waits for the GPU. Pages named -1 stay -1 unless they get tokens of
    a ring.
    """
    page_size = k_cache.shape[1]
    batch, max_blocks = block_table.shape
    exists = block_table >= 0
    if quantized.k_tail is not None:
        extra = triton.cdiv(quantized.k_tail.shape[1], page_size)
        exists = torch.nn.functional.pad(exists, (0, extra))
        ends = torch.arange(page_size, (max_blocks + extra + 1) * page_size, page_size, device=exists.device)
        exists = exists | (ends > quantized.quantized_seqlens[:, None])
        max_blocks += extra
    width = max_blocks * page_size
    k, v = gather(
        k_cache,
        v_cache,
        block_table,
        batch * width,
        dtype,
        quantized,
        cache_seqlens=cache_seqlens,
        appended=appended,
        width=width,
    )
    table = torch.arange(batch * max_blocks, dtype=torch.int32, device=exists.device).view(batch, max_blocks)
    return k.unflatten(0, (-1, page_size)), v.unflatten(0, (-1, page_size)), table.where(exists, -1)
