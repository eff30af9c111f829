"""The product with packed 2:4 sparse weights (layout: sparse24_packing.py), expanded in registers.

A lane has whole groups of four neighbouring columns, two for each matrix instruction: rows r and r + 8. One byte
permutation (PRMT) puts the two stored numbers of a group, and zeros, into the first two columns, one into the last
two. Their selectors come from byte tables of 8 entries, one a column, in registers: one permutation looks up four
groups. That is 1.3 instructions a weight.
"""

import triton
import triton.language as tl

from .codebook_fragments import permute_bytes
from .fragments import halves, in_both_halves, join_planes, multiply_add, rows_of_lanes, zero_point_word
from .split_k import arrive, sum_of_parts
from .weight_only_kernels import add_bias_and_store, load_byte, to_float32


# For each column of a group: the bytes of the stored numbers (0 and 1 of the first, 2 and 3 of the second, 4 is a zero)
# that two digits of a selector take, by the pattern 0 .. 5 of kept positions (sparse24_packing.PATTERNS).
_FIRST_LOW, _FIRST_HIGH = tl.constexpr(0x44101010), tl.constexpr(0x44444444)
_SECOND_LOW, _SECOND_HIGH = tl.constexpr(0x10444432), tl.constexpr(0x44444410)
_THIRD_LOW, _THIRD_HIGH = tl.constexpr(0x32443244), tl.constexpr(0x44441044)
_FOURTH_LOW, _FOURTH_HIGH = tl.constexpr(0x44324444), tl.constexpr(0x44443232)


@triton.jit
def word_pairs(words):
    """The four words of each lane, int32 [T, 128], as two pairs: [T, 32, 2] each."""
    return tl.split(tl.permute(tl.reshape(words, (words.shape[0], 32, 2, 2)), (0, 1, 3, 2)))


@triton.jit
def look_up(low, high, patterns, PTX: tl.constexpr):
    """The bytes that a table of 8 has for the patterns in the low four digits of `patterns`, int32: one for each digit.
    low, high: bytes 0 to 3 and 4 to 7 of the table."""
    none = patterns & 0
    return permute_bytes(none + low, none + high, patterns, PTX)


@triton.jit
def of_both_rows(a, b, PLANE: tl.constexpr, PTX: tl.constexpr):
    """From bytes of four groups (two planes, two rows): the selectors of both rows of a plane, [T, 32, 2], whose bytes
    are those of a and then of b."""
    none = a & 0
    upper = permute_bytes(a, b, none + (0x40 if PLANE == 0 else 0x62), PTX)
    return tl.join(upper, permute_bytes(a, b, none + (0x51 if PLANE == 0 else 0x73), PTX))


@triton.jit
def expand(numbers, start, end, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The stored numbers of a plane's groups, [T, 32, 2], at their positions: DTYPE [T, 128, 2]. start, end: selectors
    of the first and of the last two columns."""
    none = numbers & 0
    columns = tl.join(permute_bytes(numbers, none, start, PTX), permute_bytes(numbers, none, end, PTX))
    return halves(tl.reshape(tl.permute(columns, (0, 1, 3, 2)), (numbers.shape[0], 128)), DTYPE)


@triton.jit
def two_planes(
    numbers, patterns, zero, magic, J: tl.constexpr, FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The planes J and J + 1 (J even) of a round. numbers: the block that holds them, int32 [T, 128]; patterns: the
    round's, of 4 planes each, [T, 32] each; zero: what is added to a code, [T, 32, 2] or a scalar."""
    word = patterns[J // 4] >> 16 if J % 4 == 2 else patterns[J // 4]
    a = look_up(_FIRST_LOW, _FIRST_HIGH, word, PTX)
    b = look_up(_SECOND_LOW, _SECOND_HIGH, word, PTX)
    c = look_up(_THIRD_LOW, _THIRD_HIGH, word, PTX)
    d = look_up(_FOURTH_LOW, _FOURTH_HIGH, word, PTX)
    first, second = word_pairs(numbers)
    if FOUR_BITS:
        codes = second if J % 8 >= 4 else first
        one = in_both_halves(1.0, DTYPE)
        first = ((codes >> (J % 4 * 4)) & 0x000F000F) | magic
        second = ((codes >> (J % 4 * 4 + 4)) & 0x000F000F) | magic
        first = multiply_add(first, one, zero, DTYPE, PTX, UPCAST)
        second = multiply_add(second, one, zero, DTYPE, PTX, UPCAST)
    return (
        expand(first, of_both_rows(a, b, 0, PTX), of_both_rows(c, d, 0, PTX), DTYPE, PTX),
        expand(second, of_both_rows(a, b, 1, PTX), of_both_rows(c, d, 1, PTX), DTYPE, PTX),
    )


@triton.jit
def four_planes(
    values_at, patterns, offset, magic, round, J: tl.constexpr, FOUR_BITS: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The planes J .. J + 3 (J a multiple of 4) of a round. values_at: pointers to the first block, [T, 128]."""
    if FOUR_BITS:
        numbers = tl.load(values_at + (round * 2 + J // 8) * 128)
        following = numbers
    else:
        numbers = tl.load(values_at + (round * 8 + J // 2) * 128)
        following = tl.load(values_at + (round * 8 + J // 2 + 1) * 128)
    q0, q1 = two_planes(numbers, patterns, offset, magic, J, FOUR_BITS, DTYPE, PTX, UPCAST)
    q2, q3 = two_planes(following, patterns, offset, magic, J + 2, FOUR_BITS, DTYPE, PTX, UPCAST)
    return q0, q1, q2, q3


@triton.jit(do_not_specialize=["magic", "M", "rounds_per_split"])
def sparse24_kernel(
    x_ptr, values_ptr, places_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x,
    stride_sn, stride_sg, stride_zn, stride_zg, rounds_per_split, magic, FOUR_BITS: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PTX: tl.constexpr, QUADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, token blocks, splits of K), partial and arrivals as in few_tokens_kernel. values_ptr and
    places_ptr: int32 words. FOUR_BITS: values are codes, with scales of GROUP columns (0: one a row), and zero points
    unless zero_ptr is None. EVEN_K: 256 divides K."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    T: tl.constexpr = BLOCK_N // 16
    PART: tl.constexpr = 128 if GROUP % 128 == 0 else 64  # columns with one scale
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles, rounds = (N + 15) // 16, (K + 255) // 256
    row_ids, token_ids = row_block * BLOCK_N + tl.arange(0, BLOCK_N), token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, tokens = tl.minimum(row_ids, N - 1).to(tl.int64), tl.minimum(token_ids, M - 1).to(tl.int64)
    columns = tl.arange(0, PART)
    if not QUADS:  # a lane has two columns of either half of 16, which are the four of a group
        columns = columns // 16 * 16 + columns // 2 % 4 * 4 + columns // 8 % 2 * 2 + columns % 2
        columns = tl.max_contiguous(tl.multiple_of(columns, 2), 2)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    if FOUR_BITS:
        scale_rows = scale_ptr + rows * stride_sn
    ASYMMETRIC: tl.constexpr = zero_ptr is not None
    if ASYMMETRIC:
        lane_rows = row_block * BLOCK_N + rows_of_lanes(T)
        zero_upper = zero_ptr + tl.minimum(lane_rows, N - 1).to(tl.int64) * stride_zn
        zero_lower = zero_ptr + tl.minimum(lane_rows + 8, N - 1).to(tl.int64) * stride_zn
    tile = tl.minimum(row_block * T + tl.arange(0, T), tiles - 1).to(tl.int64)[:, None]
    places_at = places_ptr + tile * (rounds * 128) + tl.arange(0, 128)[None, :]
    values_at = values_ptr + tile * (rounds * (256 if FOUR_BITS else 1024)) + tl.arange(0, 128)[None, :]
    first_round = split * rounds_per_split
    result = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for round in tl.range(first_round, tl.minimum(first_round + rounds_per_split, rounds)):
        even, odd = tl.split(tl.reshape(tl.load(places_at + round * 128), (T, 32, 2, 2)))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
        patterns = p0, p1, p2, p3
        for part in tl.static_range(256 // PART):
            column = round * 256 + part * PART
            if EVEN_K:
                x = tl.load(x_at + column)
            else:
                x = tl.load(x_at + column, mask=(columns < K - column)[:, None], other=0.0)
            offset = 0
            if FOUR_BITS:
                group = tl.minimum(column, K - 1) // GROUP if GROUP > 0 else 0
                if GROUP > 0:
                    scale = to_float32(tl.load(scale_rows + group * stride_sg))
                if ASYMMETRIC:
                    upper = zero_point_word(load_byte(zero_upper + group * stride_zg, PTX), magic, 4, DTYPE)
                    lower = zero_point_word(load_byte(zero_lower + group * stride_zg, PTX), magic, 4, DTYPE)
                    offset = tl.reshape(tl.join(upper, lower), (T, 32, 2))
                else:
                    offset = in_both_halves(-(1024 if DTYPE == tl.float16 else 128) - 8, DTYPE)
            q0, q1, q2, q3 = four_planes(
                values_at, patterns, offset, magic, round, part * (PART // 16), FOUR_BITS, DTYPE, PTX, UPCAST
            )
            q4, q5, q6, q7 = q0, q1, q2, q3
            if PART == 128:
                q4, q5, q6, q7 = four_planes(
                    values_at, patterns, offset, magic, round, part * 8 + 4, FOUR_BITS, DTYPE, PTX, UPCAST
                )
            weight = join_planes(q0, q1, q2, q3, q4, q5, q6, q7, PART // 16, QUADS)
            if UPCAST:
                weight = weight.to(tl.float32)
                x = x.to(tl.float32)
            if FOUR_BITS and GROUP > 0:
                result += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
            else:
                result = tl.dot(weight, x, result, input_precision="ieee")
    if FOUR_BITS and GROUP == 0:
        result = result * to_float32(tl.load(scale_rows))[:, None]
    if SPLIT:
        inside = (row_ids < N)[:, None] & (token_ids < M)[None, :]
        partial_at = partial_ptr + token_ids.to(tl.int64)[None, :] * N + row_ids[:, None]
        part_stride = tl.cast(M, tl.int64) * N
        arrivals_at = arrivals_ptr + row_block * tl.num_programs(1) + token_block
        if arrive(result, partial_at, part_stride, inside, arrivals_at, split, tl.num_programs(2)):
            total = sum_of_parts(partial_at, part_stride, inside, tl.num_programs(2), BLOCK_N, BLOCK_M)
            add_bias_and_store(out_ptr, bias_ptr, total, row_ids, token_ids, M, N, bias_ptr is not None)
    else:
        add_bias_and_store(out_ptr, bias_ptr, result, row_ids, token_ids, M, N, bias_ptr is not None)
