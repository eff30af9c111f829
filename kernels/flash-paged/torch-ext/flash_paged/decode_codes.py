"""`decode_kernel` for pages of codes: int8 and fp8, or KIVI's int4 and int2 (https://arxiv.org/abs/2402.02750), whose
last tokens lie in full precision in a ring.

Every warp has 16 or 32 keys of a tile to itself, with a maximum and sums of its own, which are added when the lane is
done: no warp waits for another in the loop (with MOVE; else where weights go through shared memory). Codes are the left
operand of both products, as code_operands.py makes it; what is loaded how far ahead, config.CodesConfig says. All else
that the formats ask for joins the queries and the weights, or is added once a lane:

- Keys of 8 bits are codes plus an offset: what it adds to a score is a product of the queries with -offset, the
  accumulators' first value. Other operands have none.
- 8 bits: x = code * scale for a token. The scale joins the score, and the weight.
- 4 and 2 bits, keys: x = min + code * scale for a channel and group of tokens, so q . x = (q * scale) . code + q . min,
  both products of matrix instructions. Values: x = min + code * scale for a token, so sum p x = sum (p * scale) code +
  sum p * min; one group of channels has one number a token.

Queries are float16 in the products, divided by a power of two that keeps them below 2. Weights times scales of values
are below 2**15: what the softmax's sums are relative to follows from both (`value_exponents`). Relative to the largest
score alone, small weights times small scales would be 0 in float16, and together they may be most of the result.
"""

import triton
import triton.language as tl

from .code_loads import find_slots, load_numbers, load_queries, load_tile, page_at, tokens_present
from .code_operands import (
    channel_numbers,
    channel_of_column,
    channel_of_row,
    channels_operand,
    factor_of,
    key_operand,
    key_words,
    offset_of,
    operand_of_weights,
    value_operand,
    value_words,
)
from .decode_combine import finish_lane
from .decode_schedule import program_share, sequence_tiles
from .decode_scores import query_positions, visible_scores
from .tiles import dot


@triton.jit
def value_exponents(of_value):
    """What scores are raised by to make weights times scales of values at most 2**15: exponents of the scales, of those
    of 0 too (that of the smallest), less 14. float32, without a conversion from integers."""
    bits = tl.maximum(of_value.to(tl.float32), 2.0**-24).to(tl.int32, bitcast=True)
    return ((bits >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 127 + 14)


@triton.jit
def warp_weights(s, maximum, raised):
    """One step of the online softmax of each warp: scores s [W, KEYS, M], in powers of two -> weights, the factor [W,
    1, M] of what was summed before, and the new maximum [W, M] of the scores `raised` by so much."""
    higher = tl.maximum(maximum, tl.max(s + raised, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(s - base[:, None, :]), tl.exp2(maximum - base)[:, None, :], higher


@triton.jit
def sixteen_keys(x):
    """[W, KEYS, M], summed over every 16th key, which one lane has."""
    if x.shape[1] > 16:
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 16, 16, x.shape[2])), 1)
    return x


@triton.jit(
    do_not_specialize=["batch", "seqlen_q", "seqlen_k", "appended", "left", "right", "tiles", "kv_heads", "magic"]
)
def decode_codes_kernel(
    q, k, v, k_scale, k_min, v_scale, v_min, k_tail, v_tail, quantized_seqlens, out, lse, partial, statistics, arrivals,
    sinks, slopes, tree_mask, cache_seqlens, block_table,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_ksb,
    stride_ksg, stride_ksh, stride_vsb, stride_vst, stride_vsh, stride_ktb, stride_ktt, stride_kth, stride_vtb,
    stride_vtt, stride_vth, stride_slopes, stride_table,
    batch, seqlen_q, seqlen_k, appended, kv_heads, tiles, scale, cap, left, right, magic,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr,
    KEYS: tl.constexpr, BYTES: tl.constexpr, VALUE_BYTES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, TOKENS: tl.constexpr,
    CHANNEL_GROUPS: tl.constexpr, RING: tl.constexpr, PTX: tl.constexpr, VALUES_AHEAD: tl.constexpr,
    MOVE: tl.constexpr,
):  # fmt: skip
    """As `decode_kernel`; k and v are int32 words of codes, with strides in words. BYTES and VALUE_BYTES cover the
    codes of a token and head. 8 bits: k_scale and v_scale have the same strides, those of groups, tails and
    quantized_seqlens are None or 0. Else TOKENS share a key scale, the tail has RING slots; k_min and v_min have the
    strides of k_scale and v_scale."""
    DTYPE: tl.constexpr = q.dtype.element_ty
    HALF: tl.constexpr = tl.float32 if DTYPE == tl.float32 else tl.float16
    TREE: tl.constexpr = tree_mask is not None
    BLOCK_N: tl.constexpr = KEYS * WARPS
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    VALUE_WIDTH: tl.constexpr = VALUE_DIM * BITS // 8
    CHANNELS: tl.constexpr = BYTES * 8 // BITS
    VALUE_CHANNELS: tl.constexpr = VALUE_BYTES * 8 // BITS
    OFFSET: tl.constexpr = offset_of(BITS, IS_FLOAT, DTYPE)
    GROUPED: tl.constexpr = BITS < 8
    # the keys of a warp lie in one group (else every number is scaled by itself)
    ONE_GROUP: tl.constexpr = GROUPED and TOKENS % KEYS == 0
    key_place = key_words(WARPS, KEYS, BYTES)
    value_place = value_words(WARPS, KEYS, VALUE_BYTES, MOVE)
    channel_place = channel_numbers(WARPS, KEYS, BYTES, WIDTH, BITS)
    key_factor = factor_of(tl.arange(0, CHANNELS), BYTES, BITS, IS_FLOAT, DTYPE)[None, :, None]
    warp_key = tl.arange(0, WARPS)[:, None] * KEYS
    own_key = tl.arange(0, KEYS)[None, :] + warp_key * 0
    lanes = kv_heads * tiles
    share, position, stop, first_lane, end_lane, sequence_start = program_share(
        batch, lanes, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N, BLOCK_B
    )
    for lane in tl.range(first_lane, end_lane):
        sequence = (lane // lanes).to(tl.int64)
        length, begin, lane_tiles = sequence_tiles(
            sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N
        )
        lane_start = sequence_start + lane % lanes * lane_tiles
        first = tl.maximum(position - lane_start, 0)
        last = tl.minimum(stop - lane_start, lane_tiles)
        kv_head = (lane % lanes // tiles).to(tl.int64)
        tile = lane % tiles
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = m < seqlen_q * GROUP
        query_index = m // GROUP
        head = kv_head * GROUP + m % GROUP
        query = load_queries(
            q + sequence * stride_qb + kv_head * GROUP * stride_qh, tile * BLOCK_M, channel_place, seqlen_q * GROUP,
            stride_qt, stride_qh, GROUP, BLOCK_M, WARPS, BYTES, BITS,
        )  # fmt: skip
        query_size = tl.full([1, 1, BLOCK_M], 1.0, tl.float32)
        query = query.to(tl.float32)
        if HALF == tl.float16:
            largest = tl.max(tl.max(tl.abs(query), 1, keep_dims=True), 0, keep_dims=True)
            power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            query_size = tl.where(power > 0.0, power, 1.0)
            query = query / query_size
        scaled_query = (query * key_factor).to(HALF)
        query = query.to(HALF)
        first_scores = tl.zeros([WARPS, KEYS, BLOCK_M], tl.float32)
        if not GROUPED:
            first_scores -= OFFSET * tl.sum(scaled_query.to(tl.float32), 1)[:, None, :]

        shift = length - seqlen_q
        own_tree = tree_mask
        if TREE:
            own_tree = tree_mask + sequence * seqlen_q
        query_position, tree = query_positions(query_index, valid, shift, own_tree, TREE)
        query_position, tree = query_position[None, None, :], tree[None, None, :]
        slope = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            slope = tl.load(slopes + sequence * stride_slopes + head, mask=valid, other=0.0) * 1.4426950408889634
        slope = slope[None, None, :]
        own_table = block_table + sequence * stride_table
        keys = k + kv_head * stride_kh
        values = v + kv_head * stride_vh
        key_scales = k_scale + kv_head * stride_ksh
        value_scales = v_scale + kv_head * stride_vsh
        key_mins, value_mins = key_scales, value_scales
        if GROUPED:
            key_mins = k_min + kv_head * stride_ksh
            value_mins = v_min + kv_head * stride_vsh

        maximum = tl.full([WARPS, BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
        minimums = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)  # of values, times their weights
        acc = tl.zeros([WARPS, VALUE_CHANNELS, BLOCK_M], tl.float32)
        first_key = (begin + first) * BLOCK_N
        last_key = tl.minimum((begin + last) * BLOCK_N, length)
        end = length
        if GROUPED:
            end = tl.minimum(tl.load(quantized_seqlens + sequence), length)
        page = page_at(own_table, first_key, end, PAGE_SIZE, BLOCK_N)
        next_page = page_at(own_table, first_key + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        key, even, odd, key_scale, key_min = load_tile(
            keys, values, key_scales, key_mins, own_table, page, first_key, end, stride_kb, stride_kt, stride_vb,
            stride_vt, stride_ksb, stride_ksg, key_place, value_place, channel_place, WIDTH, BYTES, VALUE_WIDTH,
            VALUE_BYTES, TOKENS, PAGE_SIZE, BLOCK_N, KEYS, ONE_GROUP,
        )  # fmt: skip
        of_key, of_value, min_of_value = load_numbers(
            key_scales, value_scales, value_mins, own_table, page, first_key, end, stride_ksb, stride_ksg, stride_vsb,
            stride_vst, PAGE_SIZE, BLOCK_N, KEYS, WARPS, GROUPED, CHANNEL_GROUPS,
        )  # fmt: skip
        for start in tl.range(first_key, tl.minimum(last_key, end), BLOCK_N, num_stages=1):
            start = tl.multiple_of(start, BLOCK_N)
            further_page = page_at(own_table, start + 2 * BLOCK_N, end, PAGE_SIZE, BLOCK_N)
            next_key, next_even, next_odd, next_key_scale, next_key_min = load_tile(
                keys, values, key_scales, key_mins, own_table, next_page, start + BLOCK_N, end, stride_kb, stride_kt,
                stride_vb, stride_vt, stride_ksb, stride_ksg, key_place, value_place, channel_place, WIDTH, BYTES,
                VALUE_WIDTH, VALUE_BYTES, TOKENS, PAGE_SIZE, BLOCK_N, KEYS, ONE_GROUP,
            )  # fmt: skip
            _, even_here, odd_here, scale_here, key_min = load_tile(  # the compiler drops loads that nothing uses
                keys, values, key_scales, key_mins, own_table, page, start, end, stride_kb, stride_kt, stride_vb,
                stride_vt, stride_ksb, stride_ksg, key_place, value_place, channel_place, WIDTH, BYTES, VALUE_WIDTH,
                VALUE_BYTES, TOKENS, PAGE_SIZE, BLOCK_N, KEYS, ONE_GROUP,
            )  # fmt: skip
            if not VALUES_AHEAD:
                even, odd, key_scale = even_here, odd_here, scale_here
            next_of_key, next_of_value, next_min_of_value = load_numbers(
                key_scales, value_scales, value_mins, own_table, next_page, start + BLOCK_N, end, stride_ksb,
                stride_ksg, stride_vsb, stride_vst, PAGE_SIZE, BLOCK_N, KEYS, WARPS, GROUPED, CHANNEL_GROUPS,
            )  # fmt: skip
            keys_here = key_operand(key, magic, WARPS, KEYS, BYTES, BITS, IS_FLOAT, HALF, PTX)
            present = tokens_present(own_table, page, start, warp_key + own_key, end, PAGE_SIZE, BLOCK_N, KEYS)
            if not GROUPED:
                s = dot(keys_here, scaled_query, first_scores) * (of_key.to(tl.float32) * scale)[:, :, None]
                s = s * query_size
            elif ONE_GROUP:
                scales_here = channels_operand(key_scale.to(HALF), 0, WARPS, BYTES, BITS)
                scales_here = tl.broadcast_to(scales_here[:, :, None, :], (WARPS, CHANNELS, BLOCK_M // 8, 8))
                own_query = scaled_query * tl.reshape(scales_here, (WARPS, CHANNELS, BLOCK_M))
                # two sums, as each is a chain of instructions that wait for each other; all keys have the same minimums
                s = dot(channels_operand(key_min.to(HALF), 16, WARPS, BYTES, BITS), query)
                s = tl.broadcast_to(s[:, None, :, :], (WARPS, KEYS // 16, 16, BLOCK_M))
                s = dot(keys_here, own_query) + tl.reshape(s, (WARPS, KEYS, BLOCK_M))
                s = s * (scale * query_size)
            else:
                there, slot, offset = find_slots(
                    own_table, page, start, warp_key, own_key, end, PAGE_SIZE, BLOCK_N, KEYS
                )
                channel = channel_of_column(tl.arange(0, CHANNELS), WIDTH, BYTES, HEAD_DIM)
                at = there * stride_ksb + (slot + offset) // TOKENS * stride_ksg
                inside = (there >= 0)[:, :, None] & (channel < HEAD_DIM)[None, None, :]
                at = at[:, :, None] + channel[None, None, :]
                scales_here = tl.load(key_scales + at, mask=inside, other=0.0).to(tl.float32)
                mins_here = tl.load(key_mins + at, mask=inside, other=0.0).to(tl.float32)
                numbers = (keys_here.to(tl.float32) - OFFSET) * tl.reshape(key_factor, (1, 1, CHANNELS))
                s = dot((numbers * scales_here + mins_here).to(HALF), query) * (scale * query_size)
            s = visible_scores(
                s, (start + warp_key + own_key)[:, :, None], present[:, :, None], query_position, tree, own_tree, slope,
                shift, seqlen_q, left, right, 1.0, cap, HAS_LEFT, HAS_RIGHT, TREE, SOFTCAP, slopes is not None,
            )  # fmt: skip
            raised = 0.0
            if CHANNEL_GROUPS == 1:
                raised = value_exponents(of_value)[:, :, None]
            p, shrink, maximum = warp_weights(s, maximum, raised)
            total = total * shrink + sixteen_keys(p)
            value = value_operand(even, odd, magic, WARPS, KEYS, VALUE_BYTES, BITS, IS_FLOAT, HALF, PTX)
            if CHANNEL_GROUPS == 1:
                if GROUPED:
                    minimums = minimums * shrink + sixteen_keys(p * min_of_value.to(tl.float32)[:, :, None])
                p = p * of_value.to(tl.float32)[:, :, None]
            else:
                there, slot, offset = find_slots(
                    own_table, page, start, warp_key, own_key, end, PAGE_SIZE, BLOCK_N, KEYS
                )
                at = (there * stride_vsb + slot * stride_vst + offset * stride_vst)[:, None, :]
                row = tl.arange(0, VALUE_CHANNELS)
                value_channel = channel_of_row(row, VALUE_WIDTH, VALUE_BYTES, VALUE_DIM)
                value_factor = factor_of(row, VALUE_BYTES, BITS, IS_FLOAT, DTYPE)[None, :, None]
                group = tl.minimum(value_channel // (VALUE_DIM // CHANNEL_GROUPS), CHANNEL_GROUPS - 1)
                at = at + group[None, :, None]
                scales_here = tl.load(value_scales + at, mask=present[:, None, :], other=0.0).to(tl.float32)
                mins_here = tl.load(value_mins + at, mask=present[:, None, :], other=0.0).to(tl.float32)
                value = (value.to(tl.float32) * value_factor * scales_here + mins_here).to(HALF)
            # acc is not the product's accumulator: matrix instructions cut off what they add, a bias over many keys.
            # (tl.fma, as the compiler would make it that in a sum)
            product = dot(value, operand_of_weights(p.to(HALF), WARPS, KEYS, BLOCK_M, MOVE, PTX))
            acc = tl.fma(acc, tl.broadcast_to(shrink, acc.shape), product)
            key, even, odd, key_scale = next_key, next_even, next_odd, next_key_scale
            of_key, of_value, min_of_value = next_of_key, next_of_value, next_min_of_value
            page, next_page = next_page, further_page
        # plus 0, as the compiler cannot know: it would compute what follows before the loop, and hold it in registers
        value_row = tl.arange(0, VALUE_CHANNELS) + tl.minimum(length, 0)
        value_channel = channel_of_row(value_row, VALUE_WIDTH, VALUE_BYTES, VALUE_DIM)
        value_factor = factor_of(value_row, VALUE_BYTES, BITS, IS_FLOAT, DTYPE)[None, :, None]
        if CHANNEL_GROUPS == 1:
            acc = acc * value_factor + tl.sum(minimums, 1)[:, None, :]
        sums = tl.sum(total, 1)

        if GROUPED:
            RING_N: tl.constexpr = 16 * WARPS  # numbers, not codes: registers hold those of 16 keys a warp
            ring_key = tl.arange(0, 16)[None, :] + tl.arange(0, WARPS)[:, None] * 16
            natural = tl.arange(0, BLOCK_D)
            query_rows = q + sequence * stride_qb + query_index.to(tl.int64) * stride_qt + head * stride_qh
            copies = tl.zeros([WARPS, 1, 1], tl.int32)  # every warp has all queries
            there = valid[None, None, :] & (natural < HEAD_DIM)[None, :, None]
            query = tl.load(query_rows[None, None, :] + natural[None, :, None] + copies, mask=there, other=0.0)
            for start in tl.range(tl.maximum(first_key, end // BLOCK_N * BLOCK_N), last_key, RING_N, num_stages=1):
                number = start + ring_key
                present = (number >= end) & (number < length)
                at = k_tail + sequence * stride_ktb + kv_head * stride_kth + number % RING * stride_ktt
                inside = present[:, :, None] & (natural < HEAD_DIM)[None, None, :]
                s = dot(tl.load(at[:, :, None] + natural[None, None, :], mask=inside, other=0.0), query) * scale
                s = visible_scores(
                    s, number[:, :, None], present[:, :, None], query_position, tree, own_tree, slope, shift, seqlen_q,
                    left, right, 1.0, cap, HAS_LEFT, HAS_RIGHT, TREE, SOFTCAP, slopes is not None,
                )  # fmt: skip
                p, shrink, maximum = warp_weights(s, maximum, 0.0)
                sums = sums * tl.reshape(shrink, (WARPS, BLOCK_M)) + tl.sum(p, 1)
                at = v_tail + sequence * stride_vtb + kv_head * stride_vth + number % RING * stride_vtt
                inside = present[:, None, :] & (value_channel < VALUE_DIM)[None, :, None]
                value = tl.load(at[:, None, :] + value_channel[None, :, None], mask=inside, other=0.0)
                acc = dot(value, p.to(DTYPE), acc * shrink)

        highest = tl.max(maximum, 0)
        factor = tl.exp2(maximum - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
        finish_lane(
            out, lse, sinks, partial, statistics, arrivals, tl.trans(tl.sum(acc * factor[:, None, :], 0)),
            tl.sum(sums * factor, 0), highest, None, 0, sequence, kv_head, tile, lane_start, lane_tiles,
            first, last, share, seqlen_q, kv_heads, value_channel, GROUP, VALUE_DIM, ROWS, STEP,
        )  # fmt: skip
        sequence_start += tl.where(lane % lanes == lanes - 1, lanes * lane_tiles, 0)
