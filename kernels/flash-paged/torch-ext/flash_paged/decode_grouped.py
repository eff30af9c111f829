"""`decode_kernel` for KIVI caches (https://arxiv.org/abs/2402.02750): pages of int4 or int2 codes, then a tail in full
precision.

With x = min + code * scale for every channel of a group of keys, q . x = (q * scale) . code + q . min: the group's
scale joins the query, the minimum is one number a query. With x = min + code * scale for a value of weight p, sum p x =
sum (p * scale) code + sum p * min: the scale joins the weight, the minimum is one number a query. Codes come as
offset_of(DTYPE) + code, which the same numbers take back. They also count codes from the middle of their range: what
rounding q * scale and p * scale loses is then multiplied by numbers around 0.
"""

import triton
import triton.language as tl

from .decode_combine import finish_lane
from .decode_quantized import join_parts, offset_of, part_numbers
from .decode_schedule import program_share, sequence_tiles
from .decode_scores import find_pages, locate, query_positions, visible_scores
from .tiles import dot, softmax_weights


@triton.jit
def _load_part(rows, present, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK]: columns PART * WIDTH to (PART + 1) * WIDTH of row pointers, zero behind them and where not
    `present`."""
    column = tl.arange(0, BLOCK)
    pointers = rows[:, None] + (PART * WIDTH + column)[None, :]
    return tl.load(pointers, mask=present[:, None] & (column < WIDTH)[None, :], other=0)


@triton.jit
def _load_vector(at, present, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK], as `_load_part` of one row."""
    column = tl.arange(0, BLOCK)
    return tl.load(at + PART * WIDTH + column, mask=present & (column < WIDTH), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "appended", "left", "right", "tiles", "kv_heads"])
def decode_grouped_kernel(
    q, k, v, k_scale, k_min, v_scale, v_min, k_tail, v_tail, quantized_seqlens, out, lse, partial, statistics, arrivals,
    sinks, slopes, tree_mask, cache_seqlens, block_table,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_ksb,
    stride_ksg, stride_ksh, stride_vsb, stride_vst, stride_vsh, stride_ktb, stride_ktt, stride_kth, stride_vtb,
    stride_vtt, stride_vth, stride_slopes, stride_table,
    batch, seqlen_q, seqlen_k, appended, kv_heads, tiles, scale, cap, left, right,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNEL_GROUPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """As `decode_kernel`; k and v are uint8, TOKENS share a key scale, the tail has RING slots; k_min and v_min have
    the strides of k_scale and v_scale. BLOCK_D and BLOCK_DV cover one of the PARTS of the channels, which are tiles of
    their own."""
    PARTS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = HEAD_DIM // PARTS
    VALUE_WIDTH: tl.constexpr = VALUE_DIM // PARTS
    # a key tile lies in one group and one page (else every number is scaled by itself)
    ONE_GROUP: tl.constexpr = TOKENS % BLOCK_N == 0
    DTYPE: tl.constexpr = q.dtype.element_ty
    TREE: tl.constexpr = tree_mask is not None
    OFFSET: tl.constexpr = offset_of(DTYPE)
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
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
        query_rows = q + sequence * stride_qb + query_index.to(tl.int64) * stride_qt + head * stride_qh
        query = ()
        for part in tl.static_range(PARTS):
            query = query + (_load_part(query_rows, valid, part, WIDTH, BLOCK_D),)

        shift = length - seqlen_q
        own_tree = tree_mask
        if TREE:
            own_tree = tree_mask + sequence * seqlen_q
        query_position, tree = query_positions(query_index, valid, shift, own_tree, TREE)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            slope = tl.load(slopes + sequence * stride_slopes + head, mask=valid, other=0.0) * 1.4426950408889634
        own_table = block_table
        if PAGE_SIZE > 0:
            own_table = block_table + sequence * stride_table

        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = (tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.zeros([BLOCK_M, BLOCK_DV], tl.float32))
        if PARTS == 4:
            acc = acc + acc
        first_key = (begin + first) * BLOCK_N
        last_key = tl.minimum((begin + last) * BLOCK_N, length)
        quantized = tl.minimum(tl.load(quantized_seqlens + sequence), length)
        pages = find_pages(own_table, sequence, first_key, quantized, PAGE_SIZE, BLOCK_N)
        for start in tl.range(first_key, tl.minimum(last_key, quantized), BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            page, slot, offset, present = locate(pages, start, quantized, PAGE_SIZE, BLOCK_N)
            pages = find_pages(own_table, sequence, start + BLOCK_N, quantized, PAGE_SIZE, BLOCK_N)
            key_rows = k + page * stride_kb + kv_head * stride_kh + slot * stride_kt + offset * stride_kt
            value_rows = v + page * stride_vb + kv_head * stride_vh + slot * stride_vt + offset * stride_vt
            keys = _load_part(key_rows, present, 0, WIDTH, BLOCK_D)
            values = _load_part(value_rows, present, 0, VALUE_WIDTH, BLOCK_DV)

            s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if ONE_GROUP:
                at = page * stride_ksb + slot // TOKENS * stride_ksg + kv_head * stride_ksh
                for part in tl.static_range(PARTS):
                    wide_query = query[part].to(tl.float32)
                    key_scale = _load_vector(k_scale + at, page >= 0, part, WIDTH, BLOCK_D)
                    key_min = _load_vector(k_min + at, page >= 0, part, WIDTH, BLOCK_D)
                    scaled_query = (wide_query * key_scale[None, :]).to(DTYPE)
                    middle = (key_min + MIDDLE * key_scale)[None, :]
                    correction = tl.sum(wide_query * middle - (OFFSET + MIDDLE) * scaled_query.to(tl.float32), 1)
                    s = dot(scaled_query, tl.trans(part_numbers(keys, part, BITS, DTYPE)), s) + correction[:, None]
            else:
                at = page * stride_ksb + (slot + offset) // TOKENS * stride_ksg + kv_head * stride_ksh
                for part in tl.static_range(PARTS):
                    key_scale = _load_part(k_scale + at, present, part, WIDTH, BLOCK_D).to(tl.float32)
                    key_min = _load_part(k_min + at, present, part, WIDTH, BLOCK_D).to(tl.float32)
                    numbers = part_numbers(keys, part, BITS, DTYPE).to(tl.float32) - OFFSET
                    s = dot(query[part], tl.trans((numbers * key_scale + key_min).to(DTYPE)), s)
            s = visible_scores(
                s, start, present, query_position, tree, own_tree, slope, shift, seqlen_q, left, right, scale, cap,
                HAS_LEFT, HAS_RIGHT, TREE, SOFTCAP, slopes is not None,
            )  # fmt: skip
            p, shrink, total, maximum = softmax_weights(s, total, maximum, scale, True)
            at = page * stride_vsb + slot * stride_vst + offset * stride_vst + kv_head * stride_vsh
            if CHANNEL_GROUPS == 1:
                value_scale = tl.load(v_scale + at, mask=present, other=0.0).to(tl.float32)
                value_min = tl.load(v_min + at, mask=present, other=0.0).to(tl.float32)
                scaled_p = (p * value_scale[None, :]).to(DTYPE)
                middle = (value_min + MIDDLE * value_scale)[None, :]
                correction = tl.sum(p * middle - (OFFSET + MIDDLE) * scaled_p.to(tl.float32), 1)
                sums = ()
                for part in tl.static_range(PARTS):
                    numbers = part_numbers(values, part, BITS, DTYPE)
                    sums = sums + (acc[part] * shrink[:, None] + dot(scaled_p, numbers) + correction[:, None],)
                acc = sums
            else:
                sums = ()
                for part in tl.static_range(PARTS):
                    channel = part * VALUE_WIDTH + tl.arange(0, BLOCK_DV)
                    group = tl.minimum(channel // (VALUE_DIM // CHANNEL_GROUPS), CHANNEL_GROUPS - 1)
                    there = present[:, None] & (channel < VALUE_DIM)[None, :]
                    value_scale = tl.load(v_scale + at[:, None] + group[None, :], mask=there, other=0.0).to(tl.float32)
                    value_min = tl.load(v_min + at[:, None] + group[None, :], mask=there, other=0.0).to(tl.float32)
                    numbers = part_numbers(values, part, BITS, DTYPE).to(tl.float32) - OFFSET
                    numbers = (numbers * value_scale + value_min).to(DTYPE)
                    sums = sums + (acc[part] * shrink[:, None] + dot(p.to(DTYPE), numbers),)
                acc = sums

        for start in tl.range(tl.maximum(first_key, quantized // BLOCK_N * BLOCK_N), last_key, BLOCK_N, num_stages=2):
            start = tl.multiple_of(start, BLOCK_N)
            key = start + tl.arange(0, BLOCK_N)
            present = (key >= quantized) & (key < length)
            slot = key % RING
            key_rows = k_tail + sequence * stride_ktb + kv_head * stride_kth + slot * stride_ktt
            value_rows = v_tail + sequence * stride_vtb + kv_head * stride_vth + slot * stride_vtt
            s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(PARTS):
                s = dot(query[part], tl.trans(_load_part(key_rows, present, part, WIDTH, BLOCK_D)), s)
            s = visible_scores(
                s, start, present, query_position, tree, own_tree, slope, shift, seqlen_q, left, right, scale, cap,
                HAS_LEFT, HAS_RIGHT, TREE, SOFTCAP, slopes is not None,
            )  # fmt: skip
            p, shrink, total, maximum = softmax_weights(s, total, maximum, scale, True)
            sums = ()
            for part in tl.static_range(PARTS):
                values = _load_part(value_rows, present, part, VALUE_WIDTH, BLOCK_DV)
                sums = sums + (acc[part] * shrink[:, None] + dot(p.to(DTYPE), values),)
            acc = sums

        column = tl.arange(0, PARTS * BLOCK_DV)
        inside = column % BLOCK_DV < VALUE_WIDTH
        channel = tl.where(inside, column // BLOCK_DV * VALUE_WIDTH + column % BLOCK_DV, VALUE_DIM)
        finish_lane(
            out, lse, sinks, partial, statistics, arrivals, join_parts(acc), total, maximum, sequence, kv_head, tile,
            lane_start, lane_tiles, first, last, share, seqlen_q, kv_heads, channel, GROUP, VALUE_DIM, ROWS, STEP,
        )  # fmt: skip
        sequence_start += tl.where(lane % lanes == lanes - 1, lanes * lane_tiles, 0)
