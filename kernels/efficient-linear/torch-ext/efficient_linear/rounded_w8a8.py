"""The product of one token with int8 weights, which rounds the token itself: one launch instead of two."""

import torch
import triton
import triton.language as tl

from . import w8a8_configs
from .activation_quant_kernels import TINY, largest_magnitude, round_to_integer
from .split_k import arrive, split, sum_of_parts
from .w8a8 import _are_aligned, check_codes, check_devices, check_out, check_per_row, row_stride
from .w8a8_kernels import STEP
from .weight_only import DTYPES, _on


CHUNK = tl.constexpr(2048)  # numbers of x that are read at a time to find the largest


@triton.jit
def load_numbers(x_ptr, up_ptr, at, K, CHECK: tl.constexpr):
    """x, or silu(x) * up, in float32; CHECK: zeros from K on."""
    if CHECK:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + at).to(tl.float32)
    if up_ptr is not None:
        if CHECK:
            up = tl.load(up_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        else:
            up = tl.load(up_ptr + at).to(tl.float32)
        x = x / (1 + tl.exp(-x)) * up
    return x


@triton.jit
def scale_and_store(out_ptr, w_scale_ptr, bias_ptr, result, scale, row_ids, rows, N, stride_ws, BLOCK_M: tl.constexpr):
    """Stores the first token of result [BLOCK_N, BLOCK_M] times `scale` and the scales of the weight's rows, plus their
    bias. rows: `row_ids`, of which those behind the last row became it, so that they can be read."""
    total = result.to(tl.float32) * scale
    total *= tl.load(w_scale_ptr + rows * stride_ws).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    token = tl.arange(0, BLOCK_M)
    tl.store(
        out_ptr + row_ids[:, None] + token[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(row_ids < N)[:, None] & (token == 0)[None, :],
    )


@triton.jit(do_not_specialize=["steps_per_split"])
def rounded_w8a8_kernel(
    x_ptr, up_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, N, K, stride_w, stride_ws,
    steps_per_split, EVEN_K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, splits of K). Every program finds the largest number of x [K] first: its codes are those of
    quantize_rows_kernel. Matrix instructions want BLOCK_M tokens: the same one stands in all columns."""
    row_block = tl.program_id(0)
    largest = tl.zeros((1,), tl.float32)
    for start in tl.range(0, K, CHUNK):
        at = start + tl.arange(0, CHUNK)
        found = largest_magnitude(load_numbers(x_ptr, up_ptr, at, K, True)[None, :])
        larger = tl.maximum(largest.to(tl.int32, bitcast=True), found.to(tl.int32, bitcast=True))
        largest = larger.to(tl.float32, bitcast=True)
    scale = largest * (1 / 127)
    scale = tl.where(scale < TINY, TINY, scale)
    inverse = tl.div_rn(tl.full((1,), 1.0, tl.float32), scale)

    row_ids = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(row_ids, N - 1).to(tl.int64)
    columns = tl.arange(0, STEP)
    w_at = w_ptr + (rows * stride_w)[:, None] + columns[None, :]
    first_step = tl.program_id(1) * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, (K + STEP - 1) // STEP)
    result = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for step in tl.range(first_step, last_step):
        at = step * STEP + columns
        x = load_numbers(x_ptr, up_ptr, at, K, not EVEN_K)
        if EVEN_K:
            w = tl.load(w_at + step * STEP)
        else:
            w = tl.load(w_at + step * STEP, mask=(at < K)[None, :], other=0)
        codes = round_to_integer(tl.clamp(x * inverse, -128.0, 127.0)).to(tl.int8)
        result = tl.dot(w, tl.broadcast_to(codes[:, None], (STEP, BLOCK_M)), result, out_dtype=tl.int32)
    if SPLIT:
        token = tl.arange(0, BLOCK_M)
        inside = (row_ids < N)[:, None] & (token == 0)[None, :]
        partial_at = partial_ptr + row_ids[:, None] + token[None, :]
        splits = tl.num_programs(1)
        if arrive(result, partial_at, tl.cast(N, tl.int64), inside, arrivals_ptr + row_block, tl.program_id(1), splits):
            total = sum_of_parts(partial_at, tl.cast(N, tl.int64), inside, splits, BLOCK_N, BLOCK_M)
            scale_and_store(out_ptr, w_scale_ptr, bias_ptr, total, scale, row_ids, rows, N, stride_ws, BLOCK_M)
    else:
        scale_and_store(out_ptr, w_scale_ptr, bias_ptr, result, scale, row_ids, rows, N, stride_ws, BLOCK_M)


def rounded_w8a8_linear(
    x: torch.Tensor, w_codes: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`w8a8_linear` of `quantize(x, "int8")`, or of `silu_mul_quantize(x, up, format="int8")`, bit for bit, of one
    token in one launch.

    x, up: [1, K] float16, bfloat16 or float32, contiguous; the others as in `w8a8_linear`. Returns [1, N] in the dtype
    of x. Raises TypeError or ValueError for other dtypes, shapes and devices.
    """
    check_codes(torch.int8, w_codes=w_codes)
    check_out(bias, x.dtype, w_codes)
    out_features, in_features = w_codes.shape
    for name, tensor in {"x": x, "up": up}.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != (1, in_features) or (tensor.stride(1) != 1 and in_features > 1):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: allowed is a contiguous [1, {in_features}]")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is one of {DTYPES}")
    if in_features > 131071:
        raise ValueError(f"K = {in_features}: allowed is at most 131071, or the sum overflows int32")
    check_per_row("w_scale", w_scale, out_features, torch.float32)
    check_devices(w_codes.device, x=x, up=up, w_scale=w_scale, bias=bias)
    out = torch.empty(1, out_features, dtype=x.dtype, device=x.device)
    tile = w8a8_configs.choose_tile(1, False, _are_aligned(w_codes))
    row_blocks, steps = triton.cdiv(out_features, tile.block_n), triton.cdiv(in_features, STEP.value)
    shape = (1, out_features)
    per_split, splits, partial, arrivals = split(tile, row_blocks, steps, shape, torch.int32, x.device)
    with _on(x.device):
        rounded_w8a8_kernel[(row_blocks, splits)](
            x, up, w_codes, w_scale, bias, out, partial, arrivals, out_features, in_features, w_codes.stride(0),
            row_stride(w_scale), per_split, EVEN_K=in_features % STEP.value == 0, SPLIT=splits > 1,
            BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, w8a8_configs.STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return out
