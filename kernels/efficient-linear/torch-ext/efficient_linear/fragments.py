"""Device code shared by the kernels: packed words (layout: packing.py) to numbers.

The 16-bit formats are made without conversion instructions: an integer u in the low mantissa bits of 128 (bfloat16,
ulp 1) or 1024 (float16, ulp 1) is the number 128 + u or 1024 + u. For a zero point z, u = code + 2^bits - z is made by
an integer addition to both halves of a word at once (0 < u < 2^(bits + 1), nothing is carried), and the constant 128 +
2^bits or 1024 + 2^bits is subtracted from the number: every step is exact. 8-bit codes do not fit below bfloat16's
128; they go, as for float32, through 2^23 in float32, and code minus zero point is exact in bfloat16.
"""

import triton
import triton.language as tl


# The bits of 128 (bfloat16) and 1024 (float16) in both halves of a word. Handed to the kernels as a run-time argument,
# because one machine instruction does (a & immediate) | register, but not (a & immediate) | immediate.
MAGIC_BFLOAT16 = 0x43004300
MAGIC_FLOAT16 = 0x64006400


@triton.jit
def bias_of_zero_points(zero, magic, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """What to add to a word of two codes: the magic bits and 2^bits - zero point in both halves."""
    bias = ((1 << BITS) - zero) * 0x10001
    if DTYPE == tl.float16 or (DTYPE == tl.bfloat16 and BITS == 4):
        bias = bias + magic
    return bias


@triton.jit
def plane(
    words,
    bias,
    magic,
    J: tl.constexpr,
    BITS: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Codes of matrix instruction J minus zero points: words [C T, 128] -> DTYPE [C T, 128, 2]. UPCAST: the arithmetic
    is done in float32 (the interpreter has none in bfloat16)."""
    MASK: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
    CENTRE: tl.constexpr = 1 << BITS if ASYMMETRIC else 1 << (BITS - 1)
    word = (words >> (BITS * J)) & MASK
    if ASYMMETRIC:
        word = word + bias
    if DTYPE == tl.float16 or (DTYPE == tl.bfloat16 and BITS == 4):
        if not ASYMMETRIC:
            word = word | magic
        OFFSET: tl.constexpr = CENTRE + (1024 if DTYPE == tl.float16 else 128)
        low = word.to(tl.int16).to(DTYPE, bitcast=True)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        if UPCAST:
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        pair = tl.join(low, high) - tl.full((1,), OFFSET, low.dtype)
    else:
        low = ((word & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = ((word >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
        pair = tl.join(low, high) - (8388608.0 + CENTRE)
    return pair.to(DTYPE)


@triton.jit
def unpack(
    words,
    bias,
    magic,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    PLANES: tl.constexpr,
    BITS: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """words int32 [C T, 128] (chunk slowest) and bias of the row of each word, alike (read when ASYMMETRIC) -> codes
    minus zero points of the matrix instructions FIRST .. FIRST + PLANES - 1 (PLANES 2 or 4) of every chunk: DTYPE
    [16 T, 16 PLANES C].

    Only names of registers and lanes change here: what every lane has is what the matrix instruction wants from it."""
    T: tl.constexpr = words.shape[0] // C
    numbers = tl.join(
        plane(words, bias, magic, FIRST, BITS, ASYMMETRIC, DTYPE, UPCAST),
        plane(words, bias, magic, FIRST + 1, BITS, ASYMMETRIC, DTYPE, UPCAST),
    )
    if PLANES == 4:
        more = tl.join(
            plane(words, bias, magic, FIRST + 2, BITS, ASYMMETRIC, DTYPE, UPCAST),
            plane(words, bias, magic, FIRST + 3, BITS, ASYMMETRIC, DTYPE, UPCAST),
        )
        numbers = tl.join(numbers, more)
    # chunk, tile, r, t, column half, row half, h, low bit of j, high bit of j -> rows, columns
    numbers = tl.reshape(numbers, (C, T, 8, 4, 2, 2, 2, 2, PLANES // 2))
    numbers = tl.permute(numbers, (1, 5, 2, 0, 8, 7, 4, 3, 6))
    return tl.reshape(numbers, (T * 16, C * PLANES * 16))


# The shapes below are chosen for the layout that the compiler gives a load of such a shape: 32 lanes by 4 words, warps
# over tiles. In three or four dimensions Triton 3.6 and 3.7 order the dimensions differently, and the weights would
# have to change lanes.


@triton.jit
def load_words(packed_ptr, first_tile, tiles, words_in_tile, chunk, C: tl.constexpr, T: tl.constexpr):
    """C chunks of T tiles, from tile first_tile (the last of `tiles` again where there are fewer): int32 [C T,
    128]."""
    index = tl.arange(0, C * T)
    tile = tl.minimum(first_tile + index % T, tiles - 1).to(tl.int64)
    at = packed_ptr + (tile * words_in_tile + (chunk + index // T) * 128)[:, None]
    return tl.load(at + tl.arange(0, 128)[None, :])


@triton.jit
def rows_of_lanes(T: tl.constexpr):
    """The first of the two rows (the other is 8 further) within 16 T rows that each lane has: int32 [32 T]."""
    return tl.arange(0, T * 32) // 4 % 8 + tl.arange(0, T * 32) // 32 * 16


@triton.jit
def words_from_rows(upper, lower, C: tl.constexpr):
    """Values of both rows of each lane, [32 T], to values of each word: [C T, 128]."""
    T: tl.constexpr = upper.shape[0] // 32
    both = tl.expand_dims(tl.join(upper, lower), 1)
    words = tl.reshape(tl.broadcast_to(both, (T * 32, 2, 2)), (1, T, 128))
    return tl.reshape(tl.broadcast_to(words, (C, T, 128)), (C * T, 128))
