"""Products of 2:4 sparse weights, in 16 bits or in 4: few tokens read the packed weight, which is expanded in
registers."""

import torch
import triton
import triton.language as tl

from .frozen_weight import FrozenWeightProduct, needs_gradient
from .launch_configs import Tile
from .sparse24_packing import COLUMNS, check_sparse24, unpack_sparse24
from .split_k import arrive, split, sum_of_parts
from .w8a8_configs import STAGES_ON_ROCM
from .weight_only import DTYPES, INTERPRETED, _check_device, _on


# Most tokens -> tile; above, the weight is expanded once and multiplied by torch. Register counts, not measured.
TILES = {16: Tile(64, 16, 4, 3, 4), 32: Tile(64, 32, 4, 3, 4), 64: Tile(64, 64, 4, 2, 3)}


@triton.jit
def tokens_by_position(x_at, column, K, EVEN_K: tl.constexpr):
    """The tokens at columns column + 4 g + p for 16 groups g: one [16, M] for every position p."""
    if EVEN_K:
        x = tl.load(x_at + column)
    else:
        inside = tl.arange(0, 16)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :] < K - column
        x = tl.load(x_at + column, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, (16, x.shape[1], 2, 2)))
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3


@triton.jit
def product_at_position(result, first, second, nibbles, x, P: tl.constexpr, UPCAST: tl.constexpr):
    """Adds the weights that stand at position P of their group of four times the tokens there."""
    weight = tl.where(nibbles & 3 == P, first, tl.where(nibbles >> 2 == P, second, tl.zeros_like(second)))
    if UPCAST:
        weight = weight.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(weight, x, result, input_precision="ieee")


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def sparse24_kernel(
    x_ptr, values_ptr, places_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x,
    stride_sn, stride_sg, stride_zn, stride_zg, steps_per_split, FOUR_BITS: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 64 rows, token blocks, splits of K). FOUR_BITS: values are codes, with scales of GROUP columns (0:
    one a row), and zero points unless zero_ptr is None."""
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_ids = row_block * 64 + tl.arange(0, 64)
    rows = tl.minimum(row_ids, N - 1).to(tl.int64)
    token_ids = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.minimum(token_ids, M - 1).to(tl.int64)
    x_at = x_ptr + (tokens * stride_x)[None, :, None]
    x_at += tl.arange(0, 16)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    steps = (K + 127) // 128
    tile = tl.cast(row_block, tl.int64) * steps
    places_at = places_ptr + tile * 1024 + tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    VALUES: tl.constexpr = 2048 if FOUR_BITS else 4096  # of a tile and step
    values_at = values_ptr + tile * VALUES + tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 16)[None, :]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first_step = split * steps_per_split
    result = tl.zeros((64, BLOCK_M), tl.float32)
    for step in tl.range(first_step, tl.minimum(first_step + steps_per_split, steps)):
        places = tl.load(places_at + step * 1024)
        for half in tl.static_range(2):
            column = step * 128 + half * 64
            nibbles = places & 15 if half == 0 else places >> 4
            if FOUR_BITS:
                codes = tl.load(values_at + step * 2048 + half * 16).to(tl.int32)
                group = tl.minimum(column, K - 1) // GROUP if GROUP > 0 else 0
                zero = 8
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + rows * stride_zn + group * stride_zg).to(tl.int32)[:, None]
                first = ((codes & 15) - zero).to(tl.float32).to(DTYPE)
                second = ((codes >> 4) - zero).to(tl.float32).to(DTYPE)
            else:
                first = tl.load(values_at + step * 4096 + half * 16).to(DTYPE)
                second = tl.load(values_at + step * 4096 + 2048 + half * 16).to(DTYPE)
            x_0, x_1, x_2, x_3 = tokens_by_position(x_at, column, K, EVEN_K)
            part = result
            if FOUR_BITS and GROUP > 0:
                part = tl.zeros((64, BLOCK_M), tl.float32)
            part = product_at_position(part, first, second, nibbles, x_0, 0, UPCAST)
            part = product_at_position(part, first, second, nibbles, x_1, 1, UPCAST)
            part = product_at_position(part, first, second, nibbles, x_2, 2, UPCAST)
            part = product_at_position(part, first, second, nibbles, x_3, 3, UPCAST)
            if FOUR_BITS and GROUP > 0:
                scale = tl.load(scale_ptr + rows * stride_sn + group * stride_sg).to(tl.float32)
                result += part * scale[:, None]
            else:
                result = part
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
        if FOUR_BITS and GROUP == 0:
            result *= tl.load(scale_ptr + rows * stride_sn).to(tl.float32)[:, None]
        if bias_ptr is not None:
            result += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        tl.store(out_ptr + index, result.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_sparse24(
    values, places, scale=None, zero_point=None, *, group_size=None, out_features, in_features, dtype=None
) -> torch.Tensor:
    """The dense weight [N, K] in `dtype` (default: that of the values, or of the scale), on any device. Arguments and
    errors as `sparse24_linear`."""
    _check_scales(values, places, scale, zero_point, group_size, out_features, in_features)
    dense, stored = unpack_sparse24(values, places, out_features, in_features)
    if values.dtype != torch.uint8:
        return dense.to(dtype or values.dtype)
    groups = torch.arange(in_features, device=values.device) // (in_features if group_size == -1 else group_size)
    centre = 8.0 if zero_point is None else zero_point.float()[:, groups]
    weight = (dense.float() - centre) * scale.float()[:, groups]
    return weight.masked_fill(~stored, 0.0).to(dtype or scale.dtype)


def sparse24_linear_reference(
    x, values, places, scale=None, zero_point=None, bias=None, *, group_size=None, out_features, in_features
) -> torch.Tensor:
    """`sparse24_linear` in float64."""
    layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
    weight = dequantize_sparse24(values, places, scale, zero_point, **layout, dtype=torch.float32).double()
    return torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double())


def _check_scales(values, places, scale, zero_point, group_size, out_features, in_features) -> None:
    check_sparse24(values, places, out_features, in_features)
    if values.dtype != torch.uint8:
        if scale is not None or zero_point is not None:
            raise ValueError(f"values are {values.dtype}: scale and zero_point must be None")
        return
    if group_size != -1 and (not isinstance(group_size, int) or group_size <= 0 or group_size % 64):
        raise ValueError(f"group_size={group_size!r}: allowed are multiples of 64, and -1 (one group a row)")
    if scale is None:
        raise ValueError("scale is None: 4-bit values need scales")
    shape = (out_features, 1 if group_size == -1 else -(-in_features // group_size))
    for name, tensor, dtypes in (("scale", scale, DTYPES), ("zero_point", zero_point, (torch.uint8,))):
        if tensor is not None and (tensor.dtype not in dtypes or tuple(tensor.shape) != shape):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: allowed is one of {dtypes}, {shape}")


def sparse24_linear(
    x: torch.Tensor, values: torch.Tensor, places: torch.Tensor, scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, group_size: int | None = None,
    out_features: int, in_features: int, semi_structured: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x times the transpose of a packed 2:4 weight, plus bias.

    x: [M, K] float16, bfloat16 or float32, columns contiguous.
    values, places: from `pack_sparse24` (16-bit weights, in the dtype of x) or `pack_sparse24_codes` (4 bits).
    scale: [N, G] for 4 bits, G = ceil(K / group_size), 1 for group_size -1; zero_point: uint8 alike, None = 8.
    bias: [N]. group_size: multiples of 64, -1 (one group a row); None for 16-bit weights.
    semi_structured: the same weight as `torch.sparse.to_sparse_semi_structured` makes it. Above 64 tokens torch's
        sparse product (cuSPARSELt) multiplies it; without it the weight is expanded for a dense one.

    Returns [M, N] in the dtype of x. Up to 64 tokens codes minus zero points are exact in the dtype of x, sums are
    float32 and weights are not rounded. No synchronisation; the result does not depend on the order in which programs
    run. x and bias may require grad.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served.
    """
    _check_scales(values, places, scale, zero_point, group_size, out_features, in_features)
    if x.dtype not in DTYPES or (values.dtype != torch.uint8 and x.dtype != values.dtype):
        raise TypeError(f"x has dtype {x.dtype}, values {values.dtype}: allowed is one of {DTYPES}, that of the values")
    if x.dim() != 2 or x.shape[1] != in_features or (x.stride(1) != 1 and in_features > 1):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}: allowed is [M, {in_features}], columns contiguous"
        )
    if bias is not None and (tuple(bias.shape) != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is a contiguous [{out_features}]")
    for name, tensor in (("x", x), ("places", places), ("scale", scale), ("zero_point", zero_point), ("bias", bias)):
        if tensor is not None and tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device}, values on {values.device}: allowed is one device")
    if semi_structured is not None and (
        tuple(semi_structured.shape) != (out_features, in_features) or semi_structured.dtype != x.dtype
    ):
        raise ValueError(
            f"semi_structured is {semi_structured.dtype} {tuple(semi_structured.shape)}: allowed is the same weight, "
            f"{x.dtype} {(out_features, in_features)}"
        )
    _check_device(values)
    tensors = values, places, scale, zero_point, semi_structured
    layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
    if needs_gradient(x, bias, values=values, scale=scale):
        return FrozenWeightProduct.apply(x, bias, _multiply, _weight, tensors, layout)
    return _multiply(x, bias, *tensors, **layout)


def _weight(values, places, scale, zero_point, semi_structured, dtype, **layout):
    return dequantize_sparse24(values, places, scale, zero_point, **layout, dtype=dtype)


def _multiply(x, bias, values, places, scale, zero_point, semi_structured, *, group_size, out_features, in_features):
    tokens = x.shape[0]
    if tokens > max(TILES):
        weight = semi_structured
        if weight is None:
            layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
            weight = dequantize_sparse24(values, places, scale, zero_point, **layout, dtype=x.dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    out = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = next(tile for most, tile in TILES.items() if tokens <= most)
    row_blocks, steps = values.shape[:2]
    token_blocks = triton.cdiv(tokens, tile.block_m)
    programs, shape = row_blocks * token_blocks, (tokens, out_features)
    per_split, splits, partial, arrivals = split(tile, programs, steps, shape, torch.float32, x.device)
    strides = [(0, 0) if tensor is None else tensor.stride() for tensor in (scale, zero_point)]
    with _on(x.device):
        sparse24_kernel[(row_blocks, token_blocks, splits)](
            x, values, places, scale, zero_point, bias, out, partial, arrivals, tokens, out_features, in_features,
            x.stride(0), *strides[0], *strides[1], per_split, FOUR_BITS=values.dtype == torch.uint8,
            GROUP=0 if group_size in (None, -1) else group_size, EVEN_K=in_features % COLUMNS == 0, SPLIT=splits > 1,
            BLOCK_M=tile.block_m, UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return out
