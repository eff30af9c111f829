"""Quantized keys and values to numbers that the matrix instructions take (formats: kv_formats.py).

A few integer operations do what conversion instructions would: a code of 4 or 2 bits in the low mantissa bits of 1024
(float16) or 128 (bfloat16) is 1024 + code or 128 + code, and E4M3 bits shifted into place are a float16 number whose
exponent is off by a constant. The products are corrected instead (`offset_of`, `FP8_FACTOR`).
"""

import triton
import triton.language as tl


FP8_FACTOR = tl.constexpr(256.0)  # what `widen` leaves out of E4M3 numbers


@triton.jit
def widen(codes, DTYPE: tl.constexpr, IS_FLOAT: tl.constexpr):
    """int8 codes as numbers, or the bits of E4M3 numbers (int8) as numbers divided by FP8_FACTOR: exact, in DTYPE."""
    if IS_FLOAT:
        bits = codes.to(tl.int16)
        numbers = (((bits & 0x7F) << 7) | (bits & -32768)).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.constexpr_function
def offset_of(DTYPE):
    """What `part_numbers` adds to every code."""
    return 1024.0 if DTYPE == tl.float16 else (128.0 if DTYPE == tl.bfloat16 else 0.0)


@triton.jit
def part_numbers(codes, PART: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of part PART of uint8 `codes` (channel c + PART * D * BITS / 8 of byte c), plus offset_of(DTYPE), in
    DTYPE."""
    code = (codes.to(tl.int16) >> (PART * BITS)) & ((1 << BITS) - 1)
    if DTYPE == tl.float32:
        numbers = code.to(tl.float32)
    else:
        numbers = (code | (0x6400 if DTYPE == tl.float16 else 0x4300)).to(DTYPE, bitcast=True)
    return numbers


@triton.jit
def join_parts(parts):
    """2 or 4 tensors [M, C] side by side: [M, 2 C] or [M, 4 C]."""
    M: tl.constexpr = parts[0].shape[0]
    C: tl.constexpr = parts[0].shape[1]
    if len(parts) == 2:
        return tl.reshape(tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1)), (M, 2 * C))
    else:
        pairs = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (M, 4 * C))
