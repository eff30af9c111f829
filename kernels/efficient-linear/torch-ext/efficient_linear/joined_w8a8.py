"""The products of several 8-bit weights with the same few rounded tokens in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .activation_quant import has_fp8
from .joined import _check_alike, _three, check_joined
from .joined_kernels import choose, weight_of_program
from .split_k import arrive, split, sum_of_parts
from .w8a8 import _are_aligned, check_codes, check_devices, check_out, check_per_row, check_sums, row_stride
from .w8a8_configs import STAGES_ON_ROCM, choose_tile
from .w8a8_kernels import STEP, e4m3_to_float16, finish, load_codes
from .weight_only import INTERPRETED, _on


@triton.jit(do_not_specialize=["M", "N0", "N1", "N2", "steps_per_split"])
def joined_w8a8_kernel(
    x_ptr, weight0, weight1, weight2, x_scale_ptr, scale0, scale1, scale2, x_zero_ptr, sums0, sums1, sums2, bias0,
    bias1, bias2, out0, out1, out2, partial_ptr, arrivals_ptr, M, N0, N1, N2, K, stride_x, stride_w, stride_xs,
    stride_ws, stride_xz, steps_per_split, COUNT: tl.constexpr, KIND: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`w8a8_kernel` of COUNT weights without zero points, alike in all but their rows; grid (their row blocks, token
    blocks, splits of K), partial [splits, M, all rows]."""
    SUM: tl.constexpr = tl.int32 if KIND == "int8" else tl.float32
    token_block, split = tl.program_id(1), tl.program_id(2)
    which, row_block, before = weight_of_program(tl.program_id(0), N0, N1, COUNT, BLOCK_N)
    N = choose(which, N0, N1, N2, COUNT)
    w_ptr = choose(which, weight0, weight1, weight2, COUNT)
    bias_ptr = bias0
    if bias0 is not None:
        bias_ptr = choose(which, bias0, bias1, bias2, COUNT)
    sums_ptr = sums0
    if x_zero_ptr is not None:
        sums_ptr = choose(which, sums0, sums1, sums2, COUNT)
    row_ids = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    token_ids = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(row_ids, N - 1).to(tl.int64)
    tokens = tl.minimum(token_ids, M - 1).to(tl.int64)
    columns = tl.arange(0, STEP)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    w_at = w_ptr + (rows * stride_w)[:, None] + columns[None, :]
    result = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    first_step = split * steps_per_split
    for step in tl.range(first_step, tl.minimum(first_step + steps_per_split, tl.cdiv(K, STEP))):
        x, w = load_codes(x_at, w_at, (token_ids < M)[None, :], columns, step, K, EVEN_K)
        if KIND == "fp8_as_fp16":
            x = e4m3_to_float16(x)
            w = e4m3_to_float16(w)
        if KIND == "fp8":
            result = tl.dot(w, x, result, max_num_imprecise_acc=STEP)
        else:
            result = tl.dot(w, x, result, out_dtype=SUM)
    is_mine = True
    if SPLIT:
        ALL_N = N0 + N1
        if COUNT == 3:
            ALL_N += N2
        inside = (row_ids < N)[:, None] & (token_ids < M)[None, :]
        partial_at = partial_ptr + token_ids.to(tl.int64)[None, :] * ALL_N + (before + row_ids)[:, None]
        part_stride = tl.cast(M, tl.int64) * ALL_N
        arrivals_at = arrivals_ptr + tl.program_id(0) * tl.num_programs(1) + token_block
        is_mine = arrive(result, partial_at, part_stride, inside, arrivals_at, split, tl.num_programs(2))
        if is_mine:
            result = sum_of_parts(partial_at, part_stride, inside, tl.num_programs(2), BLOCK_N, BLOCK_M)
    if is_mine:
        finish(
            result, x_scale_ptr, choose(which, scale0, scale1, scale2, COUNT), x_zero_ptr, None, None, sums_ptr,
            bias_ptr, None, None, None, w_ptr, choose(which, out0, out1, out2, COUNT), row_block, token_block, M, N, K,
            stride_w, stride_xs, stride_ws, stride_xz, 0, 0, KIND, False, BLOCK_N, BLOCK_M, UPCAST,
        )  # fmt: skip


def joined_w8a8_linear(
    x_codes: torch.Tensor, weights: Sequence[tuple], x_scale: torch.Tensor, x_zero_point: torch.Tensor | None = None,
    *, out_dtype: torch.dtype,
) -> list[torch.Tensor]:  # fmt: skip
    """The products of `w8a8_linear` (int8) or `fp8_linear` (float8_e4m3fn without blocks) of x_codes [M, K], M at most
    64, with two or three weights in one launch.

    weights: (w_codes [N, K], w_scale, w_sums or None, bias or None) as there, without zero points; alike in their row
        stride, in having one scale a row or one for all, and in having a bias. w_sums: with x_zero_point.

    Returns one [M, N] a weight in out_dtype.

    Raises TypeError and ValueError as those functions, and ValueError for weights that differ or too many tokens.
    """
    check_joined(len(weights), x_codes.shape[0])
    codes, scales, sums, biases = zip(*weights)
    device, (tokens, in_features) = x_codes.device, x_codes.shape
    is_int8 = x_codes.dtype == torch.int8
    for w_codes, w_scale, w_sums, bias in weights:
        check_codes(torch.int8 if is_int8 else torch.float8_e4m3fn, x_codes=x_codes, w_codes=w_codes)
        check_out(bias, out_dtype, w_codes)
        check_per_row("w_scale", w_scale, len(w_codes), torch.float32)
        check_sums(w_sums, w_codes)
        check_devices(w_codes.device, x_codes=x_codes, x_scale=x_scale, w_scale=w_scale, bias=bias, w_sums=w_sums)
    check_per_row("x_scale", x_scale, tokens, torch.float32)
    if x_zero_point is not None:
        check_per_row("x_zero_point", x_zero_point, tokens, torch.int8)
        if any(w_sums is None for w_sums in sums):
            raise ValueError("w_sums is missing: codes of x with a zero point need it")
    if is_int8 and in_features * (255 if x_zero_point is not None else 128) * 128 >= 2**31:
        raise ValueError(f"K = {in_features} is too large: the sum overflows int32")
    _check_alike("the row stride", [w_codes.stride(0) for w_codes in codes])
    _check_alike("the stride of the scale", [row_stride(w_scale) for w_scale in scales])
    _check_alike("bias", [bias if bias is None else bias.dtype for bias in biases])
    sizes = [len(w_codes) for w_codes in codes]
    outs = [torch.empty(tokens, size, dtype=out_dtype, device=device) for size in sizes]
    if tokens == 0:
        return outs
    kind = "int8" if is_int8 else "fp8" if has_fp8(device) else "fp8_as_fp16"
    tile = choose_tile(tokens, kind == "fp8_as_fp16", _are_aligned(x_codes, *codes))
    row_blocks, token_blocks = sum(triton.cdiv(size, tile.block_n) for size in sizes), triton.cdiv(tokens, tile.block_m)
    view = torch.uint8 if kind == "fp8_as_fp16" else x_codes.dtype
    per_split, splits, partial, arrivals = split(
        tile, row_blocks * token_blocks, triton.cdiv(in_features, STEP.value), (tokens, sum(sizes)),
        torch.int32 if is_int8 else torch.float32, device,
    )  # fmt: skip
    with _on(device):
        joined_w8a8_kernel[(row_blocks, token_blocks, splits)](
            x_codes.view(view), *_three([w_codes.view(view) for w_codes in codes]), x_scale, *_three(scales),
            x_zero_point, *_three(sums), *_three(biases), *_three(outs), partial, arrivals, tokens, *_three(sizes),
            in_features, x_codes.stride(0), codes[0].stride(0), row_stride(x_scale), row_stride(scales[0]),
            row_stride(x_zero_point), per_split, COUNT=len(sizes), KIND=kind, EVEN_K=in_features % STEP.value == 0,
            SPLIT=splits > 1, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, UPCAST=INTERPRETED, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return outs
