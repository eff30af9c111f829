"""Device code shared by the kernels: packed words (layout: packing.py) to numbers.

The 16-bit formats are made without conversion instructions. bfloat16 holds integers in the low 7 bits of 128 (ulp 1),
float16 in the low 10 of 1024: a code at bit p of these is the number 128 + 2^p code, and one multiply-add by 2^-p with
-(128 * 2^-p + zero point) makes it code - zero point (for p = 0 a subtraction), every step exact. So one shift serves
all the codes that lie in one such window (three of 2 bits or two of 3 in bfloat16, five, three or two of 2, 3 or 4 in
float16) and a zero point costs no instruction. 8-bit codes do not fit below bfloat16's 128; they go, as for float32,
through 2^23 in float32, and code minus zero point is exact in bfloat16.
"""

import triton
import triton.language as tl


# The bits of 128 (bfloat16) and 1024 (float16) in both halves of a word. Handed to the kernels as a run-time argument,
# because one machine instruction does (a & immediate) | register, but not (a & immediate) | immediate.
MAGIC_BFLOAT16 = 0x43004300
MAGIC_FLOAT16 = 0x64006400


@triton.jit
def zero_point_word(zero, magic, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Zero points int32 -> the bits of what `plane` adds: -(128 + zero point) (bfloat16) or -(1024 + zero point)
    (float16) in both halves of a word, or -(2^23 + zero point) (float32, and bfloat16 with 8 bits)."""
    if DTYPE == tl.float16 or (DTYPE == tl.bfloat16 and BITS < 8):
        return zero * 0x10001 + (magic ^ -0x7FFF8000)  # one multiply-add: no bits meet
    else:
        return zero | -0x35000000


@triton.jit
def in_both_halves(value, DTYPE: tl.constexpr):
    """The word with the DTYPE number `value` (a compile-time constant) in both halves."""
    return (tl.full((1, 1), value, tl.float32).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def halves(word, DTYPE: tl.constexpr):
    """Two 16-bit numbers in each int32 of [T, 128] -> [T, 128, 2]."""
    return tl.join(word.to(tl.int16).to(DTYPE, bitcast=True), (word >> 16).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def multiply_add(word, factor, addend, DTYPE: tl.constexpr, PTX: tl.constexpr, UPCAST: tl.constexpr):
    """word * factor + addend of the numbers in both halves. On CUDA one instruction, which the compiler would find only
    for a constant addend; UPCAST: in float32 (the interpreter has no arithmetic in bfloat16)."""
    factor, addend = tl.broadcast(factor, word)[0], tl.broadcast(addend, word)[0]
    if PTX and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [word, factor, addend], tl.int32, is_pure=True, pack=1
        )
    elif PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [word, factor, addend], tl.int32, is_pure=True, pack=1
        )
    else:
        word, factor, addend = halves(word, DTYPE), halves(factor, DTYPE), halves(addend, DTYPE)
        if UPCAST:
            word, factor, addend = word.to(tl.float32), factor.to(tl.float32), addend.to(tl.float32)
        low, high = tl.split(tl.fma(word, factor, addend).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32))
        return (low & 0xFFFF) | (high << 16)


@triton.jit
def shifted_codes(words, J: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr):
    """Codes of matrix instruction J of a step, from bit P of both halves of int32 [T, 128]; words: the step's blocks,
    alike."""
    IN_WORD: tl.constexpr = 16 // BITS
    if BITS == 3 and J == 15:
        return ((words[0] >> 15) & 0x00010001) | ((words[1] >> 14) & 0x00020002) | ((words[2] >> 13) & 0x00040004)
    else:
        return (words[J // IN_WORD] >> (J % IN_WORD * BITS - P)) & (((1 << BITS) - 1 << P) * 0x10001)


@triton.jit
def plane_word(
    words, zero, magic, J: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As `plane`, two 16-bit numbers in each int32 [T, 128]; not of 8 bits."""
    MANTISSA: tl.constexpr = 10 if DTYPE == tl.float16 else 7
    WINDOW: tl.constexpr = MANTISSA // BITS  # codes that one number's mantissa holds
    P: tl.constexpr = J % (16 // BITS) % WINDOW * BITS
    CENTRE: tl.constexpr = 1 << (BITS - 1)
    ONE: tl.constexpr = 1 << MANTISSA  # the number whose ulp is 1
    if not ASYMMETRIC:
        addend = in_both_halves(-(ONE >> P) - CENTRE, DTYPE)
    elif P > 0:
        one, difference = in_both_halves(1.0, DTYPE), in_both_halves(ONE - (ONE >> P), DTYPE)
        addend = multiply_add(zero, one, difference, DTYPE, PTX, UPCAST)
    else:
        addend = zero
    factor = in_both_halves(1.0 / (1 << P), DTYPE)
    return multiply_add(shifted_codes(words, J, BITS, P) | magic, factor, addend, DTYPE, PTX, UPCAST)


@triton.jit
def plane(
    words, zero, magic, J: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Codes of matrix instruction J of a step minus zero points: words, the step's blocks, each int32 [T, 128] -> DTYPE
    [T, 128, 2]. zero: `zero_point_word` of the row of each word, alike (read when ASYMMETRIC)."""
    MANTISSA: tl.constexpr = 10 if DTYPE == tl.float16 else 7
    if DTYPE != tl.float32 and BITS <= MANTISSA:
        return halves(plane_word(words, zero, magic, J, BITS, ASYMMETRIC, DTYPE, PTX, UPCAST), DTYPE)
    else:
        word = shifted_codes(words, J, BITS, 0)
        low = ((word & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = ((word >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
        addend = zero.to(tl.float32, bitcast=True) if ASYMMETRIC else -8388608.0 - (1 << (BITS - 1))
        return tl.join(low + addend, high + addend).to(DTYPE)


@triton.jit
def columns_of(PART: tl.constexpr, QUADS: tl.constexpr):
    """The columns that `join_planes` calls 0 .. PART - 1: int32 [PART]."""
    columns = tl.arange(0, PART)
    if QUADS:
        columns = columns // 16 * 16 + columns // 2 % 2 * 8 + columns // 4 % 4 * 2 + columns % 2
        columns = tl.max_contiguous(tl.multiple_of(columns, 2), 2)
    return columns


@triton.jit
def join_planes(p0, p1, p2, p3, p4, p5, p6, p7, PLANES: tl.constexpr, QUADS: tl.constexpr):
    """The operand of PLANES (2, 4 or 8) matrix instructions, DTYPE [16 T, 16 PLANES], from their fragments [T, 128, 2]
    (those past PLANES are not read).

    Only names of registers and lanes change here: what every lane has is what the matrix instruction wants from it. A
    lane has four columns of 16, two neighbours in either half. QUADS: they are called four neighbours (see
    `weight_only.quads`), and the rows of the other operand are permuted alike, by `columns_of`."""
    T: tl.constexpr = p0.shape[0]
    numbers = tl.join(p0, p1)
    if PLANES >= 4:
        numbers = tl.join(numbers, tl.join(p2, p3))
    if PLANES == 8:
        numbers = tl.join(numbers, tl.join(tl.join(p4, p5), tl.join(p6, p7)))
    # tile, r, t, column half, row half, h, bits of j from the lowest -> rows, columns
    numbers = tl.reshape(numbers, (T, 8, 4, 2, 2, 2, 2, 2 if PLANES >= 4 else 1, 2 if PLANES == 8 else 1))
    if QUADS:
        numbers = tl.permute(numbers, (0, 4, 1, 8, 7, 6, 2, 3, 5))
    else:
        numbers = tl.permute(numbers, (0, 4, 1, 8, 7, 6, 3, 2, 5))
    return tl.reshape(numbers, (T * 16, PLANES * 16))


# The shapes below are chosen for the layout that the compiler gives a load of such a shape: 32 lanes by 4 words, warps
# over tiles. In three or four dimensions Triton 3.6 and 3.7 order the dimensions differently, and the weights would
# have to change lanes.


@triton.jit
def load_block(packed_ptr, first_tile, tiles, words_in_tile, block, T: tl.constexpr):
    """One block of T tiles, from tile first_tile (the last of `tiles` again where there are fewer): int32 [T, 128]."""
    tile = tl.minimum(first_tile + tl.arange(0, T), tiles - 1).to(tl.int64)
    return tl.load(packed_ptr + (tile * words_in_tile + block * 128)[:, None] + tl.arange(0, 128)[None, :])


@triton.jit
def load_step(packed_ptr, first_tile, tiles, words_in_tile, step, T: tl.constexpr, BLOCKS: tl.constexpr):
    """The BLOCKS (1 .. 4) blocks of a step; four, the last one again where there are fewer."""
    w0 = load_block(packed_ptr, first_tile, tiles, words_in_tile, step * BLOCKS, T)
    w1 = w0
    w2 = w0
    w3 = w0
    if BLOCKS > 1:
        w1 = load_block(packed_ptr, first_tile, tiles, words_in_tile, step * BLOCKS + 1, T)
    if BLOCKS > 2:
        w2 = load_block(packed_ptr, first_tile, tiles, words_in_tile, step * BLOCKS + 2, T)
    if BLOCKS > 3:
        w3 = load_block(packed_ptr, first_tile, tiles, words_in_tile, step * BLOCKS + 3, T)
    return w0, w1, w2, w3


@triton.jit
def rows_of_lanes(T: tl.constexpr):
    """The first of the two rows (the other is 8 further) within 16 T rows that each lane has: int32 [32 T]."""
    return tl.arange(0, T * 32) // 4 % 8 + tl.arange(0, T * 32) // 32 * 16


@triton.jit
def words_from_rows(upper, lower):
    """Values of both rows of each lane, [32 T], to values of each word: [T, 128]."""
    T: tl.constexpr = upper.shape[0] // 32
    both = tl.expand_dims(tl.join(upper, lower), 1)
    return tl.reshape(tl.broadcast_to(both, (T * 32, 2, 2)), (T, 128))
