"""Which columns of x are outliers, and the int8 codes of the others: found on the device, for the device."""

import triton
import triton.language as tl

from .activation_quant_kernels import TINY, largest_magnitude, round_to_integer


@triton.jit(do_not_specialize=["M"])
def outlier_columns_kernel(x_ptr, flags_ptr, M, K, stride_x, threshold, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Grid (row blocks, column blocks): flags int32 [K] (0 before) become 1 where |x| reaches the threshold."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    reached = tl.max((tl.abs(x) >= threshold).to(tl.int32), axis=0)
    tl.atomic_or(flags_ptr + columns, reached, mask=reached > 0)


@triton.jit(do_not_specialize=["M"])
def quantize_inliers_kernel(
    x_ptr, flags_ptr, codes_ptr, scale_ptr, columns_ptr, count_ptr, M, K, stride_x, BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """Grid (M + cdiv(K, SCAN),). Programs 0 .. M - 1: codes of a row, 0 in the flagged columns, with one scale. Each
    other one lists the flagged columns of SCAN columns behind those before them, in ascending order; the last one also
    stores their count."""
    part = tl.program_id(0) - M
    if part >= 0:
        earlier = tl.zeros([SCAN], tl.int32)
        for start in range(0, part * SCAN, SCAN):
            earlier += tl.load(flags_ptr + start + tl.arange(0, SCAN))
        found = tl.sum(earlier)
        listed = part * SCAN + tl.arange(0, SCAN)
        flags = tl.load(flags_ptr + listed, mask=listed < K, other=0)
        tl.store(columns_ptr + found + tl.cumsum(flags) - 1, listed, mask=flags > 0)
        if (part + 1) * SCAN >= K:
            tl.store(count_ptr, found + tl.sum(flags))
    else:
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < K
        inlier = tl.load(flags_ptr + columns, mask=inside, other=1) == 0
        x = tl.load(x_ptr + row * stride_x + columns, mask=inlier, other=0.0).to(tl.float32)
        scale = largest_magnitude(x[None, :]) * (1 / 127)
        scale = tl.where(scale < TINY, TINY, scale)
        tl.store(scale_ptr + row + tl.arange(0, 1), scale)
        inverse = tl.div_rn(tl.full((1,), 1.0, tl.float32), scale)
        codes = round_to_integer(tl.clamp(x * inverse, -128.0, 127.0)).to(tl.int8)
        tl.store(codes_ptr + row * K + columns, codes, mask=inside)
