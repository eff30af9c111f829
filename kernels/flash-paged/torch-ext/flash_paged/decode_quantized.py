"""Quantized keys and values to numbers that the matrix instructions take (formats: kv_formats.py).

None of this is a conversion instruction where a few integer operations on two numbers at once do: codes of 4 and 2 bits in the
low mantissa bits of 1024 (float16) or 128 (bfloat16) are 1024 + code or 128 + code, and E4M3 bits shifted into place are a
float16 or bfloat16 number whose exponent is off by a constant. The products are corrected instead (`OFFSET`, `FP8_FACTOR`).
"""

import triton
import triton.language as tl

from .tiles import INTERPRETED


FP8_FACTOR = tl.constexpr(256.0)  # what `widen` leaves out of E4M3 numbers
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def widen(codes, DTYPE: tl.constexpr, IS_FLOAT: tl.constexpr):
    """int8 codes as numbers, or the bits of E4M3 numbers (int8) as numbers divided by FP8_FACTOR: exact, in DTYPE (float32
    instead of bfloat16 under the interpreter, which has no bfloat16 products)."""
    if IS_FLOAT:
        bits = codes.to(tl.int16)
        if DTYPE == tl.bfloat16:
            numbers = (((bits & 0x7F) << 4) | (bits & -32768)).to(tl.bfloat16, bitcast=True)
            if _INTERPRETED:
                numbers = numbers.to(tl.float32)
            numbers = numbers * 5192296858534827628530496329220096.0  # 2**112: E4M3 has a bias of 7, bfloat16 of 127
        else:
            numbers = (((bits & 0x7F) << 7) | (bits & -32768)).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def offset_of(DTYPE: tl.constexpr):
    """What `unpack` adds to every code."""
    OFFSET: tl.constexpr = 1024.0 if DTYPE == tl.float16 else (128.0 if DTYPE == tl.bfloat16 else 0.0)
    return OFFSET


@triton.jit
def _plane(words, J: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The two codes at bit BITS * J of the halves of int32 words [N, W]: [N, W, 2]."""
    word = (words >> (BITS * J)) & (0x00010001 * ((1 << BITS) - 1))
    if DTYPE == tl.float32:
        return tl.join((word & 0xFFFF).to(tl.float32), (word >> 16).to(tl.float32))
    else:
        word = word | (0x64006400 if DTYPE == tl.float16 else 0x43004300)
        return tl.join(word.to(tl.int16).to(DTYPE, bitcast=True), (word >> 16).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def _planes(words, FIRST: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    return tl.join(
        tl.join(_plane(words, FIRST, BITS, DTYPE), _plane(words, FIRST + 1, BITS, DTYPE)),
        tl.join(_plane(words, FIRST + 2, BITS, DTYPE), _plane(words, FIRST + 3, BITS, DTYPE)),
    )


@triton.jit
def unpack(words, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """int32 words [N, W] of codes of 4 or 2 bits -> DTYPE [N, 32 / BITS W], offset_of(DTYPE) + code, channels in the order of
    `channels`: neighbours are the halves of one word, so that nothing moves between registers."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if BITS == 4:
        numbers = tl.permute(_planes(words, 0, BITS, DTYPE), (0, 1, 4, 3, 2))
    else:
        numbers = tl.join(_planes(words, 0, BITS, DTYPE), _planes(words, 4, BITS, DTYPE))
        numbers = tl.permute(numbers, (0, 1, 5, 4, 3, 2))
    return tl.reshape(numbers, (N, 32 // BITS * W))


@triton.jit
def channels(DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BITS: tl.constexpr):
    """The channel of every column of `unpack`, int32 [BLOCK_DIM]; DIM where there is none."""
    PARTS: tl.constexpr = 8 // BITS
    IN_WORD: tl.constexpr = 32 // BITS
    column = tl.arange(0, BLOCK_DIM)
    plane = column % IN_WORD // 2
    byte = column // IN_WORD * 4 + column % 2 * 2 + plane // PARTS
    return tl.where(byte < DIM // PARTS, byte + plane % PARTS * (DIM // PARTS), DIM)
