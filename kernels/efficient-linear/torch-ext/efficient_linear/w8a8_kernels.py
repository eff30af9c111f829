"""The product of 8-bit weights and 8-bit activations: weights are the wide operand, tokens the narrow one."""

import triton
import triton.language as tl

from .split_k import arrive, sum_of_parts


STEP = tl.constexpr(128)  # columns a loop iteration takes, and columns and rows of a block with one scale
TOKEN_BLOCKS_TOGETHER = tl.constexpr(8)  # that share a row block before the next one, so that both stay in the L2 cache
OUTLIERS = tl.constexpr(16)  # columns a matrix instruction takes


@triton.jit
def e4m3_to_float16(codes):
    """uint8 -> float16, the value of the float8_e4m3fn divided by 256, exactly (NaN becomes 480 / 256)."""
    codes = codes.to(tl.uint16)
    return ((codes & 0x80) << 8 | (codes & 0x7F) << 7).to(tl.float16, bitcast=True)


@triton.jit
def e5m2_to_float16(codes):
    """uint8 -> float16, the value of the float8_e5m2: its upper byte."""
    return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def outlier_product(
    x_ptr, w_ptr, columns_ptr, count_ptr, rows, tokens, stride_x, stride_w, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Codes of the weight times x in its own precision over the first count columns that columns lists."""
    result = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    count = tl.load(count_ptr)
    for start in tl.range(0, count, OUTLIERS, num_stages=1):
        at = start + tl.arange(0, OUTLIERS)
        columns = tl.load(columns_ptr + at, mask=at < count, other=0)
        x = tl.load(x_ptr + (tokens * stride_x)[None, :] + columns[:, None], mask=(at < count)[:, None], other=0.0)
        if UPCAST:  # the interpreter neither converts int8 to bfloat16 nor multiplies bfloat16
            x = x.to(tl.float32)
        w = tl.load(w_ptr + (rows * stride_w)[:, None] + columns[None, :]).to(x.dtype)
        result = tl.dot(w, x, result, input_precision="ieee")
    return result


@triton.jit
def finish(
    result, x_scale_ptr, w_scale_ptr, x_zero_ptr, w_zero_ptr, x_sum_ptr, w_sum_ptr, bias_ptr, outlier_x_ptr,
    outlier_columns_ptr, outlier_count_ptr, w_ptr, out_ptr, row_block, token_block, M, N, K, stride_w, stride_xs,
    stride_ws, stride_xz, stride_wz, stride_outlier, KIND: tl.constexpr, BLOCK_SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_M] of code products -> out [M, N]: zero points, scales, outliers, bias."""
    row_ids = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    token_ids = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(row_ids, N - 1).to(tl.int64)
    tokens = tl.minimum(token_ids, M - 1).to(tl.int64)
    if x_zero_ptr is not None:
        x_zero = tl.load(x_zero_ptr + tokens * stride_xz).to(tl.int32)
        result -= tl.load(w_sum_ptr + rows)[:, None] * x_zero[None, :]
    if w_zero_ptr is not None:
        w_zero = tl.load(w_zero_ptr + rows * stride_wz).to(tl.int32)
        x_sum = tl.load(x_sum_ptr + tokens)
        if x_zero_ptr is not None:
            x_sum -= K * x_zero
        result -= w_zero[:, None] * x_sum[None, :]
    total = result.to(tl.float32)
    if KIND == "fp8_as_fp16":
        total *= 65536.0  # both operands were divided by 256
    if KIND == "e5m2_as_fp16":
        total *= 256.0  # x was
    if not BLOCK_SCALES:
        total *= tl.load(x_scale_ptr + tokens * stride_xs)[None, :]
        if outlier_x_ptr is not None:
            total += outlier_product(
                outlier_x_ptr, w_ptr, outlier_columns_ptr, outlier_count_ptr, rows, tokens, stride_outlier, stride_w,
                BLOCK_N, BLOCK_M, UPCAST,
            )  # fmt: skip
        total *= tl.load(w_scale_ptr + rows * stride_ws).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    out_at = out_ptr + token_ids.to(tl.int64)[None, :] * N + row_ids[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(row_ids < N)[:, None] & (token_ids < M)[None, :])


@triton.jit
def load_codes(x_at, w_at, present, columns, step, K, EVEN_K: tl.constexpr):
    """The STEP columns of x [STEP, BLOCK_M] and of the weight [BLOCK_N, STEP] from step * STEP on, zeros from K on.
    Of up to 16, tokens that are not present are not read (see weight_only_kernels.accumulate)."""
    FEW: tl.constexpr = x_at.shape[1] <= 16
    left = columns < K - step * STEP
    if EVEN_K:
        x = tl.load(x_at + step * STEP, mask=present, other=0.0) if FEW else tl.load(x_at + step * STEP)
        w = tl.load(w_at + step * STEP)
    else:
        x = tl.load(x_at + step * STEP, mask=left[:, None] & present if FEW else left[:, None], other=0.0)
        w = tl.load(w_at + step * STEP, mask=left[None, :], other=0.0)
    return x, w


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def w8a8_kernel(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, x_zero_ptr, w_zero_ptr, x_sum_ptr, w_sum_ptr, bias_ptr, outlier_x_ptr,
    outlier_columns_ptr, outlier_count_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x, stride_w,
    stride_xs, stride_xs_block, stride_ws, stride_ws_block, stride_xz, stride_wz, stride_outlier, steps_per_split,
    KIND: tl.constexpr, BLOCK_SCALES: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks * token blocks, splits of K).

    KIND: "int8" (int32 sums), "fp8" (pointers to float8_e4m3fn, matrix instructions of that type) or "fp8_as_fp16"
    (pointers to uint8; for GPUs whose float8 is another or none). "e5m2_as_fp16": the same with weights in E5M2.
    BLOCK_SCALES: the product of 128 columns is multiplied by its scales and added in float32.
    TMA: codes come through the tensor memory accelerator, which also fills in zeros past the edges; addresses and row
    strides are multiples of 16.
    SPLIT: every program stores its sum in partial [splits, M, N]; whoever arrives last at arrivals int32 [row blocks *
    token blocks] (0 before and after) adds the sums in the order of the splits."""
    INTEGER: tl.constexpr = KIND == "int8"
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    row_blocks = (N + BLOCK_N - 1) // BLOCK_N
    token_blocks = (M + BLOCK_M - 1) // BLOCK_M
    together = TOKEN_BLOCKS_TOGETHER * row_blocks
    first_token_block = tl.program_id(0) // together * TOKEN_BLOCKS_TOGETHER
    members = tl.minimum(token_blocks - first_token_block, TOKEN_BLOCKS_TOGETHER)
    token_block = first_token_block + tl.program_id(0) % together % members
    row_block = tl.program_id(0) % together // members

    rows = tl.minimum(row_block * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    tokens = tl.minimum(token_block * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    present = (token_block * BLOCK_M + tl.arange(0, BLOCK_M) < M)[None, :]
    columns = tl.arange(0, STEP)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    w_at = w_ptr + (rows * stride_w)[:, None] + columns[None, :]
    if BLOCK_SCALES:
        x_scale_at = x_scale_ptr + tokens * stride_xs
        w_scale_at = w_scale_ptr + tl.cast(row_block * BLOCK_N // STEP, tl.int64) * stride_ws
    if TMA:
        x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [stride_x, 1], [BLOCK_M, STEP])
        w_tiles = tl.make_tensor_descriptor(w_ptr, [N, K], [stride_w, 1], [BLOCK_N, STEP])
    first_step = tl.program_id(1) * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, (K + STEP - 1) // STEP)
    result = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    for step in tl.range(first_step, last_step):
        if TMA:
            x = x_tiles.load([token_block * BLOCK_M, step * STEP]).T
            w = w_tiles.load([row_block * BLOCK_N, step * STEP])
        else:
            x, w = load_codes(x_at, w_at, present, columns, step, K, EVEN_K)
        if KIND == "fp8_as_fp16":
            x = e4m3_to_float16(x)
            w = e4m3_to_float16(w)
        if KIND == "e5m2_as_fp16":
            x = e4m3_to_float16(x)
            w = e5m2_to_float16(w)
        if BLOCK_SCALES:
            scale = tl.load(x_scale_at + step * stride_xs_block) * tl.load(w_scale_at + step * stride_ws_block)
            result += tl.dot(w, x) * scale[None, :]
        elif KIND == "fp8":
            # Hopper adds float8 products with 14 bits unless told to move them to float32 registers
            result = tl.dot(w, x, result, max_num_imprecise_acc=STEP)
        else:
            result = tl.dot(w, x, result, out_dtype=SUM)

    arguments = (
        x_scale_ptr, w_scale_ptr, x_zero_ptr, w_zero_ptr, x_sum_ptr, w_sum_ptr, bias_ptr, outlier_x_ptr,
        outlier_columns_ptr, outlier_count_ptr, w_ptr, out_ptr, row_block, token_block, M, N, K, stride_w, stride_xs,
        stride_ws, stride_xz, stride_wz, stride_outlier,
    )  # fmt: skip
    if SPLIT:
        row_ids = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
        token_ids = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row_ids < N)[:, None] & (token_ids < M)[None, :]
        partial_at = partial_ptr + token_ids.to(tl.int64)[None, :] * N + row_ids[:, None]
        split_stride = tl.cast(M, tl.int64) * N
        split, splits = tl.program_id(1), tl.num_programs(1)
        if arrive(result, partial_at, split_stride, inside, arrivals_ptr + tl.program_id(0), split, splits):
            total = sum_of_parts(partial_at, split_stride, inside, splits, BLOCK_N, BLOCK_M)
            finish(total, *arguments, KIND, BLOCK_SCALES, BLOCK_N, BLOCK_M, UPCAST)
    else:
        finish(result, *arguments, KIND, BLOCK_SCALES, BLOCK_N, BLOCK_M, UPCAST)
