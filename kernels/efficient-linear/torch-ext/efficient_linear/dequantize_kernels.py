"""Packed weights to weights in memory.

A program takes a step of some rows. Numbers are made, multiplied by their scale and rounded where the lanes have them,
which is as matrix instructions take them; only the 16-bit results change lanes, once, so that rows are stored in pieces
of 16 bytes a lane.
"""

import triton
import triton.language as tl

from .codebook_fragments import load_codebook
from .decode import pair
from .fragments import join_planes, load_step, rows_of_lanes, words_from_rows, zero_point_word


@triton.jit
def of_group(
    scale_upper, scale_lower, zero_upper, zero_lower, column, K, stride_sg, stride_zg, GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Scale and `zero_point_word` of the group of a column (past K: of the last one), for the row of each word: [T,
    128]. The first four arguments are the places of the first group, of both rows of each lane."""
    group = tl.minimum(column, K - 1) // GROUP if GROUP > 0 else 0
    at = group * stride_sg
    scale = words_from_rows(tl.load(scale_upper + at).to(tl.float32), tl.load(scale_lower + at).to(tl.float32))
    zero = 0
    if ASYMMETRIC:
        at = group * stride_zg
        upper, lower = tl.load(zero_upper + at).to(tl.int32), tl.load(zero_lower + at).to(tl.int32)
        zero = words_from_rows(zero_point_word(upper, 0, 0, tl.float32), zero_point_word(lower, 0, 0, tl.float32))
    return scale, zero


@triton.jit
def weights_of(
    words, scale, zero, codebook_at, tables, J: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    LOOKUP: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The weights of the matrix instructions J and J + 1, rounded to DTYPE."""
    CODES: tl.constexpr = DTYPE if LOOKUP > 0 else tl.float32
    p0, p1 = pair(words, zero, 0, codebook_at, tables, J, BITS, ASYMMETRIC, LOOKUP, CODES, PTX, False)
    scale = tl.expand_dims(scale, 2)
    return (p0.to(tl.float32) * scale).to(DTYPE), (p1.to(tl.float32) * scale).to(DTYPE)


@triton.jit
def dequantize_kernel(
    packed_ptr, scale_ptr, zero_ptr, codebook_ptr, out_ptr, N, K, stride_sn, stride_sg, stride_zn, stride_zg,
    BITS: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, LOOKUP: tl.constexpr, PER_ROW: tl.constexpr,
    PTX: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (steps, row blocks): out [N, K] = (code - zero point) * scale or entry * scale, computed in float32 and
    rounded once; entries of a codebook are first rounded to the dtype of out."""
    COLUMNS: tl.constexpr = 256 if BITS == 3 else 128  # packing.step_columns
    BLOCKS: tl.constexpr = COLUMNS * BITS // 256
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    T: tl.constexpr = BLOCK_N // 16
    step, row_block = tl.program_id(0), tl.program_id(1)
    words_in_tile = tl.num_programs(0) * (BLOCKS * 128)
    words = load_step(packed_ptr, row_block * T, (N + 15) // 16, words_in_tile, step, T, BLOCKS)
    lane_rows = row_block * BLOCK_N + rows_of_lanes(T)
    codebook_at, tables = 0, 0
    if LOOKUP > 0:
        codebook_at, tables = load_codebook(codebook_ptr, lane_rows, N, BITS, LOOKUP, PER_ROW, DTYPE)
    upper, lower = tl.minimum(lane_rows, N - 1).to(tl.int64), tl.minimum(lane_rows + 8, N - 1).to(tl.int64)
    zero_upper, zero_lower = 0, 0
    if ASYMMETRIC:
        zero_upper, zero_lower = zero_ptr + upper * stride_zn, zero_ptr + lower * stride_zn
    places = scale_ptr + upper * stride_sn, scale_ptr + lower * stride_sn, zero_upper, zero_lower
    rows = (row_block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    for part in tl.static_range(COLUMNS // 128):
        first = step * COLUMNS + part * 128
        # of each quarter of the 128 columns
        s0, z0 = of_group(*places, first, K, stride_sg, stride_zg, GROUP, ASYMMETRIC)
        s1, z1, s2, z2 = s0, z0, s0, z0
        if GROUP == 32:
            s1, z1 = of_group(*places, first + 32, K, stride_sg, stride_zg, GROUP, ASYMMETRIC)
        if GROUP == 32 or GROUP == 64:
            s2, z2 = of_group(*places, first + 64, K, stride_sg, stride_zg, GROUP, ASYMMETRIC)
        s3, z3 = s2, z2
        if GROUP == 32:
            s3, z3 = of_group(*places, first + 96, K, stride_sg, stride_zg, GROUP, ASYMMETRIC)
        of_table = codebook_at, tables
        p0, p1 = weights_of(words, s0, z0, *of_table, part * 8, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX)
        p2, p3 = weights_of(words, s1, z1, *of_table, part * 8 + 2, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX)
        p4, p5 = weights_of(words, s2, z2, *of_table, part * 8 + 4, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX)
        p6, p7 = weights_of(words, s3, z3, *of_table, part * 8 + 6, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX)
        weight = join_planes(p0, p1, p2, p3, p4, p5, p6, p7, 8, False)
        columns = (first + tl.arange(0, 128))[None, :]
        tl.store(out_ptr + rows.to(tl.int64) * K + columns, weight, mask=(rows < N) & (columns < K))
