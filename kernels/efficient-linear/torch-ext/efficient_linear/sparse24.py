"""Products of 2:4 sparse weights, in 16 bits or in 4: few tokens read the packed weight, which is expanded in
registers."""

import torch
import triton

from .fragments import MAGIC_BFLOAT16, MAGIC_FLOAT16
from .frozen_weight import FrozenWeightProduct, needs_gradient
from .launch_configs import Tile
from .sparse24_kernels import sparse24_kernel
from .sparse24_packing import COLUMNS, check_sparse24, unpack_sparse24
from .split_k import split
from .w8a8_configs import STAGES_ON_ROCM
from .weight_only import DTYPES, INTERPRETED, PTX, _check_device, _on, _scale_strides, quads


# Most tokens -> tile; above, and for float32, the weight is expanded once and multiplied by torch. Register counts, not
# measured.
TILES = {16: Tile(64, 16, 4, 3, 3), 32: Tile(64, 32, 4, 3, 3), 64: Tile(64, 64, 4, 2, 2)}


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

    Returns [M, N] in the dtype of x. Up to 64 tokens in 16 bits codes minus zero points are exact in the dtype of x,
    sums are float32 and weights are not rounded. No synchronisation; the result does not depend on the order in which
    programs run. x and bias may require grad.

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
    if tokens > max(TILES) or x.dtype == torch.float32:
        weight = semi_structured
        if weight is None:
            layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
            weight = dequantize_sparse24(values, places, scale, zero_point, **layout, dtype=x.dtype)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    out = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = next(tile for most, tile in TILES.items() if tokens <= most)
    row_blocks, rounds = triton.cdiv(out_features, tile.block_n), triton.cdiv(in_features, COLUMNS)
    token_blocks = triton.cdiv(tokens, tile.block_m)
    programs, shape = row_blocks * token_blocks, (tokens, out_features)
    per_split, splits, partial, arrivals = split(tile, programs, rounds, shape, torch.float32, x.device)
    strides = [_scale_strides(tensor) for tensor in (scale, zero_point)]
    with _on(x.device):
        sparse24_kernel[(row_blocks, token_blocks, splits)](
            x, values.view(torch.int32), places.view(torch.int32), scale, zero_point, bias, out, partial, arrivals,
            tokens, out_features, in_features, x.stride(0), *strides[0], *strides[1], per_split,
            MAGIC_FLOAT16 if x.dtype == torch.float16 else MAGIC_BFLOAT16, FOUR_BITS=values.dtype == torch.uint8,
            GROUP=0 if group_size in (None, -1) else group_size, EVEN_K=in_features % COLUMNS == 0, PTX=PTX,
            QUADS=quads(x.device), SPLIT=splits > 1, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
            UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return out
