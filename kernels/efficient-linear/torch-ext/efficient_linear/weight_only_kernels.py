"""The matrix products with packed weights: weights are the wide operand, tokens the narrow one.

Both kernels compute a tile [BLOCK_N rows of the weight, BLOCK_M tokens] of the transposed output with `accumulate`.
Codes minus zero points are exact in the dtype of x (entries of a codebook are rounded to it); their products with x are
added in float32 and multiplied by the group's scale in float32, so a weight is never rounded.

Instructions in the loop for one weight (sm_90, bfloat16, 16 tokens, groups of 64, Triton 3.7): 2.7, 3.1, 2.9, 4.8 for
2, 3, 4, 8 bits, 0.2 more with zero points; 2.8, 3.2, 4.1 for codebooks of 2, 3, 4 bits. A round of the loop takes 256
columns. A zero point itself takes none: the subtraction that removes the 128 removes it too. Taking both out of the
products, as (128 + zero point) * sum(x), would save that subtraction, half an instruction a weight. It is not done: it
needs sums of x (a second matrix product of ones, an eighth of an instruction but as much work again for the matrix
units, or a pass before this one), and the sum would lose five bits to cancellation (eight in float16).
"""

import triton
import triton.language as tl

from .codebook_fragments import load_codebook
from .decode import unpack
from .fragments import columns_of, load_step, rows_of_lanes, words_from_rows, zero_point_word
from .launch_configs import steps_a_round
from .register_products import accumulate_in_registers
from .split_k import arrive, sum_of_parts


@triton.jit
def load_byte(at, PTX: tl.constexpr):
    """uint8 at each pointer, as int32.

    On CUDA by an instruction of its own: the compiler takes the smallest type that it sees loaded for that of the
    weights, and for a byte a lane of sm_80 would get eight neighbouring columns, which lie in other lanes."""
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.nc.u8 $0, [$1];", "=r,l", [at.to(tl.int64)], tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(at).to(tl.int32)


@triton.jit
def load_zero(at, offset, ASYMMETRIC: tl.constexpr, PTX: tl.constexpr):
    """The zero points that lie `offset` behind the pointers `at`. They become `zero_point_word` where they are used: a
    conversion before the loop's end would wait there for the load."""
    if ASYMMETRIC:
        return load_byte(at + offset, PTX)
    else:
        return 0


@triton.jit
def to_float32(scale):
    """A scale in float32, where it is used (see `load_zero`). The compiler converts bfloat16 by inline assembly, which
    it repeats for every use of a number; a shift it does once."""
    if scale.dtype == tl.bfloat16:
        return (scale.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def accumulate(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, row_block, token_block, first_step, last_step, M, N, K, stride_x,
    stride_sn, stride_sg, stride_zn, stride_zg, magic, BITS: tl.constexpr, GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
    codebook_ptr=None, LOOKUP: tl.constexpr = 0, PER_ROW: tl.constexpr = False, PTX: tl.constexpr = False,
    QUADS: tl.constexpr = False, WARPS: tl.constexpr = 0, EXCHANGE: tl.constexpr = False,
):  # fmt: skip
    """Sum over the steps (packing.step_columns) first_step .. last_step - 1: float32 [BLOCK_N, BLOCK_M]. GROUP 0 = one
    group a row. EVEN_K: 128 divides K. LOOKUP > 0: codes are of a codebook (codebook_fragments.py) with one table,
    [2^BITS], or with one for every row (PER_ROW), [N, 2^BITS]. WARPS > 0: by `accumulate_in_registers`."""
    if WARPS > 0:
        return accumulate_in_registers(
            x_ptr, packed_ptr, scale_ptr, zero_ptr, row_block, token_block, first_step, last_step, M, N, K, stride_x,
            stride_sn, stride_zn, magic, BITS, GROUP, ASYMMETRIC, BLOCK_N, BLOCK_M, UPCAST, PTX, WARPS,
            EXCHANGE,
        )  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = 256 if BITS == 3 else 128  # packing.step_columns
    BLOCKS: tl.constexpr = COLUMNS * BITS // 256
    PART: tl.constexpr = GROUP if GROUP > 0 and GROUP < 128 else 128  # columns with one scale
    PARTS: tl.constexpr = COLUMNS // PART
    ROUND: tl.constexpr = steps_a_round(BLOCK_M, BITS)
    T: tl.constexpr = BLOCK_N // 16

    tiles = (N + 15) // 16
    steps = (K + COLUMNS - 1) // COLUMNS
    words_in_tile = steps * (BLOCKS * 128)
    lane_rows = row_block * BLOCK_N + rows_of_lanes(T)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # Of up to 16, tokens that there are not are not read: reading the last one for all of them, every program would
    # want the same few bytes at the same time from one place of the L2 cache. Larger tiles have no registers for it.
    present = (tokens < M)[None, :]
    tokens = tl.minimum(tokens, M - 1).to(tl.int64)
    columns = columns_of(PART, QUADS)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    last_group = (K - 1) // GROUP if GROUP > 0 else 0

    group = first_step * COLUMNS // GROUP if GROUP > 0 else 0
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    scale_at = scale_ptr + tl.minimum(rows, N - 1).to(tl.int64) * stride_sn
    zero_upper, zero_lower = 0, 0
    if ASYMMETRIC:
        zero_upper = zero_ptr + tl.minimum(lane_rows, N - 1).to(tl.int64) * stride_zn
        zero_lower = zero_ptr + tl.minimum(lane_rows + 8, N - 1).to(tl.int64) * stride_zn
    scale = tl.load(scale_at + group * stride_sg)
    upper = load_zero(zero_upper, group * stride_zg, ASYMMETRIC, PTX)
    lower = load_zero(zero_lower, group * stride_zg, ASYMMETRIC, PTX)
    codebook_at, tables = 0, 0
    if LOOKUP > 0:
        codebook_at, tables = load_codebook(codebook_ptr, lane_rows, N, BITS, LOOKUP, PER_ROW, DTYPE)
    result = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(first_step, tl.minimum(last_step, steps), loop_unroll_factor=ROUND):
        words = load_step(packed_ptr, row_block * T, tiles, words_in_tile, step, T, BLOCKS)
        for part in tl.static_range(PARTS):
            column = step * COLUMNS + part * PART
            left = (columns < K - column)[:, None]
            if EVEN_K and COLUMNS == 128:
                x = tl.load(x_at + column, mask=present, other=0.0) if BLOCK_M <= 16 else tl.load(x_at + column)
            else:
                x = tl.load(x_at + column, mask=left & present if BLOCK_M <= 16 else left, other=0.0)
            zero = 0
            if ASYMMETRIC:
                zero = words_from_rows(
                    zero_point_word(upper, magic, BITS, DTYPE), zero_point_word(lower, magic, BITS, DTYPE)
                )
            weight = unpack(
                words, zero, magic, codebook_at, tables, part * (PART // 16), PART // 16, BITS, ASYMMETRIC, LOOKUP,
                DTYPE, PTX, UPCAST, QUADS,
            )  # fmt: skip
            if UPCAST:
                weight = weight.to(tl.float32)
                x = x.to(tl.float32)
            if GROUP > 0:
                # the scale and zero point of the next part are loaded before they are needed
                at, offset = group * stride_sg, group * stride_zg
                if GROUP == PART and EVEN_K and COLUMNS == 128 and part + 1 < PARTS:  # beside the first of the step
                    at += (part + 1) * stride_sg
                    offset += (part + 1) * stride_zg
                else:
                    following = step * PARTS + part + 1 if GROUP == PART else (column + PART) // GROUP
                    group = tl.minimum(following, last_group)
                    at, offset = group * stride_sg, group * stride_zg
                next_scale = tl.load(scale_at + at)
                next_upper = load_zero(zero_upper, offset, ASYMMETRIC, PTX)
                next_lower = load_zero(zero_lower, offset, ASYMMETRIC, PTX)
                result += tl.dot(weight, x, input_precision="ieee") * to_float32(scale)[:, None]
                scale = next_scale
                upper = next_upper
                lower = next_lower
            else:
                result = tl.dot(weight, x, result, input_precision="ieee")
    if GROUP == 0:
        result = result * to_float32(scale)[:, None]
    return result


@triton.jit
def add_bias_and_store(out_ptr, bias_ptr, result, rows, tokens, M, N, HAS_BIAS: tl.constexpr):
    """result [BLOCK_N, BLOCK_M] float32 (+ bias [N]) -> out [M, N]."""
    inside = (rows < N)[:, None] & (tokens < M)[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["magic", "M", "steps_per_split"])
def few_tokens_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, codebook_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K,
    stride_x, stride_sn, stride_sg, stride_zn, stride_zg, steps_per_split, magic, BITS: tl.constexpr,
    GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, LOOKUP: tl.constexpr,
    PER_ROW: tl.constexpr, PTX: tl.constexpr, QUADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, UPCAST: tl.constexpr, WARPS: tl.constexpr,
    EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, token blocks, splits of K). With SPLIT every program stores its sum in partial float32
    [splits, M, N]; whoever arrives last at arrivals int32 [row blocks * token blocks] (0 before and after) adds the
    sums in the order of the splits, so the result does not depend on the order of arrival."""
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_step = split * steps_per_split
    result = accumulate(
        x_ptr, packed_ptr, scale_ptr, zero_ptr, row_block, token_block, first_step, first_step + steps_per_split, M, N,
        K, stride_x, stride_sn, stride_sg, stride_zn, stride_zg, magic, BITS, GROUP, ASYMMETRIC, EVEN_K, BLOCK_N,
        BLOCK_M, UPCAST, codebook_ptr, LOOKUP, PER_ROW, PTX, QUADS, WARPS, EXCHANGE,
    )  # fmt: skip
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if SPLIT:
        inside = (rows < N)[:, None] & (tokens < M)[None, :]
        partial_at = partial_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
        part_stride = tl.cast(M, tl.int64) * N
        arrivals_at = arrivals_ptr + row_block * tl.num_programs(1) + token_block
        if arrive(result, partial_at, part_stride, inside, arrivals_at, split, tl.num_programs(2)):
            total = sum_of_parts(partial_at, part_stride, inside, tl.num_programs(2), BLOCK_N, BLOCK_M)
            add_bias_and_store(out_ptr, bias_ptr, total, rows, tokens, M, N, HAS_BIAS)
    else:
        add_bias_and_store(out_ptr, bias_ptr, result, rows, tokens, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["magic", "M"])
def many_tokens_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, codebook_ptr, bias_ptr, out_ptr, M, N, K, stride_x, stride_sn, stride_sg,
    stride_zn, stride_zg, magic, BITS: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, LOOKUP: tl.constexpr, PER_ROW: tl.constexpr, PTX: tl.constexpr,
    QUADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks, row blocks): token blocks of one row block are neighbours in time, so that its packed
    weights are read from memory once and then found in the L2 cache."""
    token_block, row_block = tl.program_id(0), tl.program_id(1)
    result = accumulate(
        x_ptr,
        packed_ptr,
        scale_ptr,
        zero_ptr,
        row_block,
        token_block,
        0,
        (K + 127) // 128,  # or fewer
        M,
        N,
        K,
        stride_x,
        stride_sn,
        stride_sg,
        stride_zn,
        stride_zg,
        magic,
        BITS,
        GROUP,
        ASYMMETRIC,
        EVEN_K,
        BLOCK_N,
        BLOCK_M,
        UPCAST,
        codebook_ptr,
        LOOKUP,
        PER_ROW,
        PTX,
        QUADS,
    )
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    add_bias_and_store(out_ptr, bias_ptr, result, rows, tokens, M, N, HAS_BIAS)
