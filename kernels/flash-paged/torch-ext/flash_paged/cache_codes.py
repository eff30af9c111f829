"""Device functions that quantize, with the bits of quantized_reference.py: float32, rounded to nearest even."""

import triton
import triton.language as tl


@triton.jit
def round_half_even(x):
    """x rounded, for float32 below 2**22 in magnitude."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum has no bits behind the point


@triton.jit
def to_e4m3(x):
    """float32 in [-448, 448] -> the bits of float8_e4m3fn, uint8. By integer operations, because sm_80 has no such
    type."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # Below 2**-6 steps are 2**-9 wide, as those of float32 at 2**14.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    return (tl.where(magnitude < (121 << 23), small, normal) | sign).to(tl.uint8)


@triton.jit
def from_e4m3(bits):
    """The bits of float8_e4m3fn, uint8 -> float32, by way of a float16 number that is 2**8 too small."""
    wide = bits.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def quantize_tokens(x, IS_FLOAT: tl.constexpr):
    """float32 [rows, D] -> codes [rows, D] (int8, or uint8 bits of fp8) and scale float16 [rows]."""
    LEVELS: tl.constexpr = 448.0 if IS_FLOAT else 127.0
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), 1), LEVELS), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)[:, None]
    codes = tl.div_rn(x, tl.where(wide > 0.0, wide, 1.0))
    codes = tl.where(wide > 0.0, tl.minimum(tl.maximum(codes, -LEVELS), LEVELS), 0.0)
    if IS_FLOAT:
        codes = to_e4m3(codes)
    else:
        codes = round_half_even(codes).to(tl.int8)
    return codes, scale


@triton.jit
def group_scale(low, high, BITS: tl.constexpr, CLIP: tl.constexpr):
    """Scale and minimum, float16, of every group from its least and largest number. CLIP: the part of the range that is
    cut off at either end, a power of two, so that products are exact, or 0."""
    LEVELS: tl.constexpr = 2.0**BITS - 1
    low = tl.minimum(tl.maximum(low, -65504.0), 65504.0)
    high = tl.minimum(tl.maximum(high, -65504.0), 65504.0)
    margin = (high - low) * CLIP
    low = (low + margin).to(tl.float16)
    scale = tl.div_rn(high - margin - low.to(tl.float32), LEVELS)
    return tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16), low


@triton.jit
def group_codes(x, scale, low, BITS: tl.constexpr):
    """float32 x, float16 scale and low of shapes that broadcast -> codes int32 in [0, 2**BITS)."""
    LEVELS: tl.constexpr = 2.0**BITS - 1
    wide = scale.to(tl.float32)
    codes = tl.div_rn(x - low.to(tl.float32), tl.where(wide > 0.0, wide, 1.0))
    codes = tl.where(wide > 0.0, tl.minimum(tl.maximum(codes, 0.0), LEVELS), 0.0)
    return round_half_even(codes).to(tl.int32)
