"""The matrix products with packed 4- and 8-bit weights: weights are the wide operand, tokens the narrow one.

Both kernels compute a tile [BLOCK_N rows of the weight, BLOCK_M tokens] of the transposed output with `accumulate`.
Codes minus zero points are exact in the dtype of x; their products with x are added in float32 and multiplied by the
group's scale in float32, so a weight is never rounded.
"""

import triton
import triton.language as tl

from .fragments import bias_of_zero_points, load_words, rows_of_lanes, unpack, words_from_rows


STEP = tl.constexpr(128)  # columns a loop iteration takes; packing.COLUMNS


@triton.jit
def load_bias(
    zero_ptr,
    rows,
    group,
    N,
    stride_zn,
    stride_zg,
    magic,
    BITS: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """For every word of CHUNKS chunks the bias of its row and group: int32 [CHUNKS T, 128]."""
    if ASYMMETRIC:
        at = zero_ptr + group * stride_zg
        upper = tl.load(at + tl.minimum(rows, N - 1).to(tl.int64) * stride_zn).to(tl.int32)
        lower = tl.load(at + tl.minimum(rows + 8, N - 1).to(tl.int64) * stride_zn).to(tl.int32)
        return words_from_rows(
            bias_of_zero_points(upper, magic, BITS, DTYPE), bias_of_zero_points(lower, magic, BITS, DTYPE), CHUNKS
        )
    else:
        return 0


@triton.jit
def accumulate(
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    row_block,
    token_block,
    first_step,
    last_step,
    M,
    N,
    K,
    stride_x,
    stride_sn,
    stride_sg,
    stride_zn,
    stride_zg,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Sum over the steps first_step .. last_step - 1 of STEP columns: float32 [BLOCK_N, BLOCK_M]. GROUP 0 = one group
    a row."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    CHUNK: tl.constexpr = 16 * (16 // BITS)
    PART: tl.constexpr = GROUP if GROUP > 0 and GROUP < STEP else STEP  # columns with one scale
    PARTS: tl.constexpr = STEP // PART
    CHUNKS: tl.constexpr = PART // CHUNK if PART > CHUNK else 1
    SHARERS: tl.constexpr = CHUNK // PART if CHUNK > PART else 1  # parts in one chunk
    PLANES: tl.constexpr = 16 // BITS // SHARERS
    T: tl.constexpr = BLOCK_N // 16

    tiles = (N + 15) // 16
    words_in_tile = (K + STEP - 1) // STEP * (STEP * BITS * 16 // 32)
    rows = tl.minimum(row_block * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    lane_rows = row_block * BLOCK_N + rows_of_lanes(T)
    tokens = tl.minimum(token_block * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    columns = tl.arange(0, PART)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    last_group = (K - 1) // GROUP if GROUP > 0 else 0

    group = first_step * STEP // GROUP if GROUP > 0 else 0
    scale = tl.load(scale_ptr + rows * stride_sn + group * stride_sg).to(tl.float32)
    bias = load_bias(zero_ptr, lane_rows, group, N, stride_zn, stride_zg, magic, BITS, ASYMMETRIC, DTYPE, CHUNKS)
    result = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(first_step, last_step):
        for part in tl.static_range(PARTS):
            column = step * STEP + part * PART
            if part % SHARERS == 0:
                words = load_words(packed_ptr, row_block * T, tiles, words_in_tile, column // CHUNK, CHUNKS, T)
            if EVEN_K:
                x = tl.load(x_at + column)
            else:
                x = tl.load(x_at + column, mask=(columns < K - column)[:, None], other=0.0)
            weight = unpack(
                words, bias, magic, CHUNKS, part % SHARERS * PLANES, PLANES, BITS, ASYMMETRIC, DTYPE, UPCAST
            )
            if UPCAST:
                weight = weight.to(tl.float32)
                x = x.to(tl.float32)
            if GROUP > 0:
                # the scale and zero point of the next part are asked for before they are needed
                group = tl.minimum((column + PART) // GROUP, last_group)
                next_scale = tl.load(scale_ptr + rows * stride_sn + group * stride_sg).to(tl.float32)
                next_bias = load_bias(
                    zero_ptr, lane_rows, group, N, stride_zn, stride_zg, magic, BITS, ASYMMETRIC, DTYPE, CHUNKS
                )
                result += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
                scale = next_scale
                bias = next_bias
            else:
                result = tl.dot(weight, x, result, input_precision="ieee")
    if GROUP == 0:
        result = result * scale[:, None]
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
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    M,
    N,
    K,
    stride_x,
    stride_sn,
    stride_sg,
    stride_zn,
    stride_zg,
    steps_per_split,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (row blocks, token blocks, splits of K). With SPLIT every program stores its sum in partial float32
    [splits, M, N]; whoever arrives last at arrivals int32 [row blocks * token blocks] (0 before and after) adds the
    sums in the order of the splits, so the result does not depend on the order of arrival."""
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_step = split * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, (K + STEP - 1) // STEP)
    result = accumulate(
        x_ptr,
        packed_ptr,
        scale_ptr,
        zero_ptr,
        row_block,
        token_block,
        first_step,
        last_step,
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
    )
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if SPLIT:
        inside = (rows < N)[:, None] & (tokens < M)[None, :]
        partial_at = partial_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
        split_stride = tl.cast(M, tl.int64) * N
        tl.store(partial_at + split * split_stride, result, mask=inside)
        tl.debug_barrier()  # every thread's partial sums are written before one thread says so
        arrivals_ptr += row_block * tl.num_programs(1) + token_block
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(2) - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in range(tl.num_programs(2)):
                total += tl.load(partial_at + other * split_stride, mask=inside, other=0.0, cache_modifier=".cg")
            add_bias_and_store(out_ptr, bias_ptr, total, rows, tokens, M, N, HAS_BIAS)
            tl.store(arrivals_ptr, 0)
    else:
        add_bias_and_store(out_ptr, bias_ptr, result, rows, tokens, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["magic", "M"])
def many_tokens_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_x,
    stride_sn,
    stride_sg,
    stride_zn,
    stride_zg,
    magic,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
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
        (K + STEP - 1) // STEP,
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
    )
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    add_bias_and_store(out_ptr, bias_ptr, result, rows, tokens, M, N, HAS_BIAS)


@triton.jit
def dequantize_kernel(
    packed_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    stride_sn,
    stride_sg,
    stride_zn,
    stride_zg,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (row blocks, steps of 128 columns): out [N, K] = (code - zero point) * scale, computed in float32 and
    rounded once."""
    PLANES: tl.constexpr = 16 // BITS
    CHUNKS: tl.constexpr = STEP // (16 * PLANES)
    T: tl.constexpr = BLOCK_N // 16
    words_in_tile = (K + STEP - 1) // STEP * (STEP * BITS * 16 // 32)
    first_tile, chunk = tl.program_id(0) * T, tl.program_id(1) * CHUNKS
    words = load_words(packed_ptr, first_tile, (N + 15) // 16, words_in_tile, chunk, CHUNKS, T)
    numbers = unpack(words, 0, 0, CHUNKS, 0, PLANES, BITS, False, tl.float32, False)

    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * STEP + tl.arange(0, STEP))[None, :]
    groups = columns // GROUP if GROUP > 0 else columns * 0
    inside = (rows < N) & (columns < K)
    scale = tl.load(scale_ptr + rows * stride_sn + groups * stride_sg, mask=inside, other=0.0).to(tl.float32)
    if ASYMMETRIC:
        zero = tl.load(zero_ptr + rows * stride_zn + groups * stride_zg, mask=inside, other=0).to(tl.float32)
        numbers += (1 << (BITS - 1)) - zero
    tl.store(out_ptr + rows * K + columns, (numbers * scale).to(out_ptr.dtype.element_ty), mask=inside)
