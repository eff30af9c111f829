"""Products of ternary weights and int8 activations (BitNet b1.58, https://arxiv.org/abs/2402.17764)."""

import torch
import triton
import triton.language as tl

from .launch_configs import Tile
from .split_k import arrive, split, sum_of_parts
from .ternary_packing import COLUMNS, check_ternary, unpack_ternary
from .w8a8 import check_devices, check_per_row, row_stride, w8a8_linear
from .w8a8_configs import STAGES_ON_ROCM
from .weight_only import DTYPES, _check_device, _on


# Most tokens -> tile; above, the weight is unpacked to int8 once. Register and memory counts, not measured.
TILES = {16: Tile(64, 16, 4, 4, 4), 32: Tile(64, 32, 4, 4, 4), 64: Tile(64, 64, 4, 3, 3), 256: Tile(64, 128, 4, 3)}


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def ternary_kernel(
    x_ptr, packed_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x,
    stride_xs, stride_ws, steps_per_split, EVEN_K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 64 rows, token blocks, splits of K). Sums are int32, parts of them go to partial [splits, M,
    N]."""
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_ids = row_block * 64 + tl.arange(0, 64)
    token_ids = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.minimum(token_ids, M - 1).to(tl.int64)
    columns = tl.arange(0, 32)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    steps = (K + 127) // 128
    packed_at = packed_ptr + tl.cast(row_block, tl.int64) * steps * 2048
    packed_at += tl.arange(0, 64)[:, None] * 32 + columns[None, :]
    first_step = split * steps_per_split
    result = tl.zeros((64, BLOCK_M), tl.int32)
    for step in tl.range(first_step, tl.minimum(first_step + steps_per_split, steps)):
        words = tl.load(packed_at + step * 2048)
        for part in tl.static_range(4):
            column = step * 128 + part * 32
            if EVEN_K:
                x = tl.load(x_at + column)
            else:
                x = tl.load(x_at + column, mask=(columns < K - column)[:, None], other=0)
            trits = ((words >> 2 * part) & 3).to(tl.int8) - 1
            result = tl.dot(trits, x, result, out_dtype=tl.int32)
    inside = (row_ids < N)[:, None] & (token_ids < M)[None, :]
    index = token_ids.to(tl.int64)[None, :] * N + row_ids[:, None]
    last = True
    if SPLIT:
        splits = tl.num_programs(2)
        part_stride = tl.cast(M, tl.int64) * N
        arrivals_ptr += row_block * tl.num_programs(1) + token_block
        last = arrive(result, partial_ptr + index, part_stride, inside, arrivals_ptr, split, splits)
        if last:
            result = sum_of_parts(partial_ptr + index, part_stride, inside, splits, 64, BLOCK_M)
    if last:
        rows = tl.minimum(row_ids, N - 1)
        total = result.to(tl.float32) * tl.load(x_scale_ptr + tokens * stride_xs)[None, :]
        total *= tl.load(w_scale_ptr + rows * stride_ws)[:, None]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)


def ternary_linear_reference(x_codes, packed, x_scale, w_scale, bias=None, *, out_features) -> torch.Tensor:
    """`ternary_linear` in float64."""
    trits = unpack_ternary(packed, out_features, x_codes.shape[1])
    sums = x_codes.double() @ trits.double().t()  # integers below 2^53: exact
    y = sums * x_scale.double().reshape(-1, 1) * w_scale.double().reshape(1, -1)
    return y if bias is None else y + bias.double()


def ternary_linear(
    x_codes: torch.Tensor,
    packed: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """int8 activations times the transpose of a packed ternary weight, times both scales, plus bias.

    x_codes: int8 [M, K], columns contiguous. packed: from `pack_ternary` of a weight [out_features, K].
    x_scale: float32, one value, [M] or [M, 1] (BitNet: one a token); w_scale: float32, one value, [N] or [N, 1]
        (BitNet: one). bias: [N], float of any kind. out_dtype: float16, bfloat16 or float32.

    Returns [M, N]. Sums are exact in int32; scales and bias are float32, rounded once. Above 256 tokens the weight is
    unpacked to int8 for one call of `w8a8_linear`. No synchronisation; the result does not depend on the order in which
    programs run.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served.
    """
    if x_codes.dtype != torch.int8:
        raise TypeError(f"x_codes has dtype {x_codes.dtype}: allowed is torch.int8")
    if x_codes.dim() != 2 or x_codes.shape[1] == 0 or (x_codes.shape[1] > 1 and x_codes.stride(1) != 1):
        given = f"shape {tuple(x_codes.shape)} and strides {x_codes.stride()}"
        raise ValueError(f"x_codes has {given}: allowed is [M, K], columns contiguous")
    tokens, in_features = x_codes.shape
    check_ternary(packed, out_features, in_features)
    if out_dtype not in DTYPES:
        raise TypeError(f"out_dtype={out_dtype}: allowed is one of {DTYPES}")
    if bias is not None and (tuple(bias.shape) != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is a contiguous [{out_features}]")
    check_per_row("x_scale", x_scale, tokens, torch.float32)
    check_per_row("w_scale", w_scale, out_features, torch.float32)
    check_devices(packed.device, x_codes=x_codes, x_scale=x_scale, w_scale=w_scale, bias=bias)
    _check_device(packed)
    if tokens > max(TILES):
        trits = unpack_ternary(packed, out_features, in_features)
        return w8a8_linear(x_codes, trits, x_scale, w_scale, bias, out_dtype=out_dtype)
    out = torch.empty(tokens, out_features, dtype=out_dtype, device=packed.device)
    if tokens == 0:
        return out
    tile = next(tile for most, tile in TILES.items() if tokens <= most)
    row_blocks, token_blocks, steps = packed.shape[0], triton.cdiv(tokens, tile.block_m), packed.shape[1]
    programs, shape = row_blocks * token_blocks, (tokens, out_features)
    per_split, splits, partial, arrivals = split(tile, programs, steps, shape, torch.int32, packed.device)
    with _on(packed.device):
        ternary_kernel[(row_blocks, token_blocks, splits)](
            x_codes, packed, x_scale, w_scale, bias, out, partial, arrivals, tokens, out_features, in_features,
            x_codes.stride(0), row_stride(x_scale), row_stride(w_scale), per_split,
            EVEN_K=in_features % COLUMNS == 0, SPLIT=splits > 1, BLOCK_M=tile.block_m, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return out
