"""Rows of floats to rows of 8-bit codes in one pass over memory, together with the operation that makes the rows.

Codes of given rows are bit for bit those of activation_reference.py: products, quotients and roundings are single
float32 operations, and the clamp between a product and the rounding keeps compilers from fusing the two. The norm and
SiLU before them agree to float32 accuracy.
"""

import triton
import triton.language as tl


TINY = tl.constexpr(2.0**-100)  # smallest scale: its inverse is finite, and a row of zeros has codes 0
E4M3_MAX = tl.constexpr(448.0)
GROUP = tl.constexpr(128)  # columns with one scale in the format "fp8_block"


@triton.jit
def round_to_integer(value):
    """float32 below 2^22 -> int32, half to even: the sum with 1.5 * 2^23 has an ulp of 1."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def round_to_e4m3(value):
    """float32 within +-448, or NaN -> uint8, the bits of the nearest float8_e4m3fn, half to even; for GPUs without
    the conversion instruction."""
    magnitude = tl.abs(value)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2^14 has an ulp of 2^-9
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    rounded = tl.where(magnitude < 2.0**-6, subnormal, normal) | sign
    return tl.where(value == value, rounded, 0x7F).to(tl.uint8)


@triton.jit
def largest_magnitude(x):
    """The largest |x| of every row, NaN if there is one: the bits of positive floats are ordered as integers are."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def quantize_rows_kernel(
    x_ptr, other_ptr, weight_ptr, static_scale_ptr, static_zero_ptr, codes_ptr, scale_ptr, zero_ptr, residual_ptr,
    normalised_ptr, K, stride_x, stride_other, eps, SOURCE: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,), BLOCK >= K. SOURCE "plain": x; "rms_norm": x (+ other) divided by its root mean square, times
    weight; "silu_mul": silu(x) * other. With a static scale (and zero point) scale_ptr and zero_ptr are not
    written."""
    GROUPS: tl.constexpr = BLOCK // GROUP if FORMAT == "fp8_block" else 1
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * (BLOCK // GROUPS) + tl.arange(0, BLOCK // GROUPS)[None, :]
    inside = columns < K
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if other_ptr is not None:
        other = tl.load(other_ptr + row * stride_other + columns, mask=inside, other=0.0).to(tl.float32)
    if SOURCE == "silu_mul":
        x = x / (1 + tl.exp(-x)) * other
    if SOURCE == "rms_norm":
        if other_ptr is not None:
            rounded = (x + other).to(x_ptr.dtype.element_ty)
            tl.store(residual_ptr + row * K + columns, rounded, mask=inside)
            x = rounded.to(tl.float32)
        mean_square = tl.sum(tl.sum(x * x, axis=1), axis=0) / K
        x = x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
        x = x * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if normalised_ptr is not None:
            tl.store(normalised_ptr + row * K + columns, x.to(x_ptr.dtype.element_ty), mask=inside)

    if static_scale_ptr is not None:
        scale = tl.load(static_scale_ptr + tl.arange(0, GROUPS) * 0).to(tl.float32)
    else:
        largest = largest_magnitude(x)
        if FORMAT == "int8":
            scale = largest * (1 / 127)
        elif FORMAT == "int8_asymmetric":
            low = tl.minimum(tl.min(x, axis=1), 0.0)
            scale = (tl.maximum(tl.max(x, axis=1), 0.0) - low) * (1 / 255)
            scale = tl.where(largest == largest, scale, largest)
        else:
            scale = largest * (1 / 448)
        scale = tl.where(scale < TINY, TINY, scale)
        groups = tl.arange(0, GROUPS)
        number_of_groups = tl.cdiv(K, GROUP) if FORMAT == "fp8_block" else 1
        tl.store(scale_ptr + row * number_of_groups + groups, scale, mask=groups < number_of_groups)
    inverse = tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), scale)
    codes_ptr += row * K
    if FORMAT == "int8":
        codes = round_to_integer(tl.clamp(x * inverse[:, None], -128.0, 127.0)).to(tl.int8)
    elif FORMAT == "int8_asymmetric":
        if static_scale_ptr is not None:
            zero = tl.load(static_zero_ptr + tl.arange(0, GROUPS) * 0).to(tl.int32)
        else:
            zero = round_to_integer(tl.clamp(-low * inverse, 0.0, 255.0)) - 128
            tl.store(zero_ptr + row + tl.arange(0, GROUPS), zero.to(tl.int8))
        codes = round_to_integer(tl.clamp(x * inverse[:, None], -512.0, 512.0)) + zero[:, None]
        codes = tl.minimum(tl.maximum(codes, -128), 127).to(tl.int8)
    else:
        x = tl.clamp(x * inverse[:, None], -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE_FP8 else round_to_e4m3(x)
    tl.store(codes_ptr + columns, codes, mask=inside)
