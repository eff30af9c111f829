"""Loads of `decode_codes_kernel`: page numbers, codes, and the numbers that go with them."""

import triton
import triton.language as tl

from .code_operands import channels_operand


@triton.jit
def page_at(block_table, start, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of keys start..start+BLOCK_N, -1 where there is none; unused where a tile has several."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(block_table + start // PAGE_SIZE, mask=start < limit, other=-1)
    else:
        return start * 0


@triton.jit
def find_slots(
    block_table, page, start, warp_key, key, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr
):
    """Page (int64, -1 where there is none) and slot of keys start + warp_key + key, which broadcast to the shape of
    `key`, or to that of one key a warp or a tile where these lie in one page; and the slots after that one. page: of
    `page_at`."""
    if PAGE_SIZE % BLOCK_N == 0:
        slot = start % PAGE_SIZE
        offset = warp_key + key
    elif PAGE_SIZE % KEYS == 0:
        first = start + warp_key
        page = tl.load(block_table + first // PAGE_SIZE, mask=first < limit, other=-1)
        slot = first % PAGE_SIZE
        offset = key
    else:
        first = start + warp_key + key
        page = tl.load(block_table + first // PAGE_SIZE, mask=first < limit, other=-1)
        slot = first % PAGE_SIZE
        offset = key * 0
    return page.to(tl.int64), slot, offset


@triton.jit
def load_words(
    cache, block_table, page, start, place, further, limit, stride_b, stride_t, WIDTH: tl.constexpr,
    BYTES: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Words of keys (`key_words`, `value_words`), `further` keys on. Where there is no page, some of page 0: codes are
    finite numbers, whatever they are."""
    warp_key, key, word = place
    page, slot, offset = find_slots(block_table, page, start, warp_key, key + further, limit, PAGE_SIZE, BLOCK_N, KEYS)
    at = cache + tl.maximum(page, 0) * stride_b + slot * stride_t + (offset * stride_t + word)
    if at.shape[1] == 32:  # one word a lane. Triton 3.6 would let rows be neighbours, and then exchange all of it
        at = tl.max_contiguous(at, [1, 2])
    if BYTES == WIDTH:
        return tl.load(at)
    else:
        return tl.load(at, mask=(word < WIDTH // 4) & (offset >= 0), other=0)


@triton.jit
def load_channels(
    numbers, block_table, page, start, place, limit, stride_b, stride_g, WIDTH: tl.constexpr, BYTES: tl.constexpr,
    TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Numbers of channels of groups of TOKENS tokens (`channel_numbers`); where there is no page, some of page 0."""
    warp_key, row, channel, there = place
    page, slot, offset = find_slots(block_table, page, start, warp_key, row * 0, limit, PAGE_SIZE, BLOCK_N, KEYS)
    if TOKENS % BLOCK_N == 0:
        offset = offset * 0
    at = numbers + tl.maximum(page, 0) * stride_b + (slot + offset) // TOKENS * stride_g + channel
    if BYTES == WIDTH:
        return tl.load(at)
    else:
        return tl.load(at, mask=there & (offset >= 0), other=0.0)


@triton.jit
def load_queries(
    q, first, place, rows, stride_qt, stride_qh, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr,
    BYTES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Rows first to first + BLOCK_M of the queries of a key head, as an operand that every warp has: [WARPS, channels,
    BLOCK_M] in the order of `key_operand`."""
    _, row, channel, there = place
    m = first + row
    at = q + (m // GROUP).to(tl.int64) * stride_qt + m % GROUP * stride_qh + channel
    query = channels_operand(tl.load(at, mask=there & (m < rows), other=0.0), 0, WARPS, BYTES, BITS)
    if BLOCK_M == 16:
        m += 8
        at = q + (m // GROUP).to(tl.int64) * stride_qt + m % GROUP * stride_qh + channel
        more = channels_operand(tl.load(at, mask=there & (m < rows), other=0.0), 0, WARPS, BYTES, BITS)
        query = tl.reshape(tl.permute(tl.join(query, more), (0, 1, 3, 2)), (WARPS, BYTES * 8 // BITS, BLOCK_M))
    return query


@triton.jit
def _load_some_tokens(
    numbers, block_table, page, start, first, limit, stride_b, stride_t, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Of 16 keys of every warp, from `first` on."""
    warp_key = tl.arange(0, WARPS)[:, None] * KEYS
    key = first + tl.arange(0, 16)[None, :] + warp_key * 0
    page, slot, offset = find_slots(block_table, page, start, warp_key, key, limit, PAGE_SIZE, BLOCK_N, KEYS)
    present = (start + warp_key + key < limit) & (page >= 0)
    at = tl.maximum(page, 0) * stride_b + slot * stride_t + offset * stride_t
    return tl.load(numbers + at, mask=present, other=0.0)


@triton.jit
def load_tokens(
    numbers, block_table, page, start, limit, stride_b, stride_t, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Numbers of tokens, [WARPS, KEYS], 0 where there is none. By 16 keys of a warp, which are fewer than its lanes:
    then the compiler lets each lane load those that it wants, rather than exchange them through shared memory."""
    x = _load_some_tokens(
        numbers, block_table, page, start, 0, limit, stride_b, stride_t, PAGE_SIZE, BLOCK_N, KEYS, WARPS
    )
    if KEYS >= 32:
        more = _load_some_tokens(
            numbers, block_table, page, start, 16, limit, stride_b, stride_t, PAGE_SIZE, BLOCK_N, KEYS, WARPS
        )
        x = tl.reshape(tl.permute(tl.join(x, more), (0, 2, 1)), (WARPS, 32))
    return x


@triton.jit
def tokens_present(
    block_table, page, start, key, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr
):
    """Which of the keys start + `key` [WARPS, KEYS] there are."""
    warp_key = tl.arange(0, key.shape[0])[:, None] * KEYS
    own = key - warp_key
    page, _, _ = find_slots(block_table, page, start, warp_key, own, limit, PAGE_SIZE, BLOCK_N, KEYS)
    return (start + key < limit) & (page >= 0)


@triton.jit
def load_tile(
    keys, values, key_scales, key_mins, block_table, page, start, limit, stride_kb, stride_kt, stride_vb, stride_vt,
    stride_ksb, stride_ksg, key_place, value_place, channel_place, WIDTH: tl.constexpr, BYTES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_BYTES: tl.constexpr, TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, KEYS: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """Words of keys, of values of even and of odd keys, and with ONE_GROUP scales and minimums of key channels."""
    key = load_words(
        keys, block_table, page, start, key_place, 0, limit, stride_kb, stride_kt, WIDTH, BYTES, PAGE_SIZE, BLOCK_N,
        KEYS,
    )  # fmt: skip
    even = load_words(
        values, block_table, page, start, value_place, 0, limit, stride_vb, stride_vt, VALUE_WIDTH, VALUE_BYTES,
        PAGE_SIZE, BLOCK_N, KEYS,
    )  # fmt: skip
    odd = load_words(
        values, block_table, page, start, value_place, 1, limit, stride_vb, stride_vt, VALUE_WIDTH, VALUE_BYTES,
        PAGE_SIZE, BLOCK_N, KEYS,
    )  # fmt: skip
    key_scale = start * 0
    key_min = start * 0
    if ONE_GROUP:
        key_scale = load_channels(
            key_scales, block_table, page, start, channel_place, limit, stride_ksb, stride_ksg, WIDTH, BYTES, TOKENS,
            PAGE_SIZE, BLOCK_N, KEYS,
        )  # fmt: skip
        key_min = load_channels(
            key_mins, block_table, page, start, channel_place, limit, stride_ksb, stride_ksg, WIDTH, BYTES, TOKENS,
            PAGE_SIZE, BLOCK_N, KEYS,
        )  # fmt: skip
    return key, even, odd, key_scale, key_min


@triton.jit
def load_numbers(
    key_scales, value_scales, value_mins, block_table, page, start, limit, stride_ksb, stride_ksg, stride_vsb,
    stride_vst, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr,
    GROUPED: tl.constexpr, CHANNEL_GROUPS: tl.constexpr,
):  # fmt: skip
    """Numbers of tokens, as far as there is one each: scales of keys and of values, and minimums of values."""
    of_key = start * 0
    of_value = start * 0
    min_of_value = start * 0
    if not GROUPED:
        of_key = load_tokens(
            key_scales, block_table, page, start, limit, stride_ksb, stride_ksg, PAGE_SIZE, BLOCK_N, KEYS, WARPS
        )
    if CHANNEL_GROUPS == 1:
        of_value = load_tokens(
            value_scales, block_table, page, start, limit, stride_vsb, stride_vst, PAGE_SIZE, BLOCK_N, KEYS, WARPS
        )
        if GROUPED:
            min_of_value = load_tokens(
                value_mins, block_table, page, start, limit, stride_vsb, stride_vst, PAGE_SIZE, BLOCK_N, KEYS, WARPS
            )
    return of_key, of_value, min_of_value
