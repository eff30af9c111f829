"""Weight-only quantized linear layers on Triton: checks, choice of kernel, launch."""

import os

import torch
import triton

from .codebook_fragments import GATHER, PERMUTE
from .dequantize_kernels import dequantize_kernel
from .fragments import MAGIC_BFLOAT16, MAGIC_FLOAT16
from .frozen_weight import FrozenWeightProduct, needs_gradient
from .launch_configs import (
    CHUNK,
    DEQUANTIZE_ABOVE,
    IN_REGISTERS,
    MOST_WITHOUT_ZERO_POINTS,
    RegisterTile,
    Tile,
    choose_tile,
    stages,
)
from .packing import COLUMNS, check_layout, check_packed, number_of_groups, step_columns
from .split_k import split
from .weight_only_kernels import few_tokens_kernel, many_tokens_kernel


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PTX = torch.version.hip is None and not INTERPRETED  # kernels may use instructions of NVIDIA GPUs


def quads(device: torch.device, block_m: int = 16) -> bool:
    """Whether the compiler gives a lane four neighbouring columns of a weight that is joined from parts, not two.

    It does so where matrix instructions take both operands from registers: on compute capabilities 8.x and 12.x, and on
    9.x for tiles of 8 tokens."""
    return PTX and torch.cuda.get_device_capability(device)[0] in ((8, 9, 12) if block_m < 16 else (8, 12))


def _has_small_tiles(device: torch.device) -> bool:
    """Whether matrix instructions of 8 tokens (`launch_configs.SMALL`) take both operands from registers."""
    return INTERPRETED or quads(device, 8)


def _on_hopper(device: torch.device) -> bool:
    return PTX and torch.cuda.get_device_capability(device)[0] == 9


def few_tokens_tile(x, scales, zeros, bits: int, group_size: int | None, small: bool = False) -> Tile:
    """The tile of a product of checked arguments, of `register_products` where it applies. scales and zeros: of all
    weights (zeros may be None); small: as `choose_tile`."""
    tokens, in_features = x.shape
    zeros = [each for each in zeros if each is not None]
    aligned = (each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (*scales, *zeros))
    most, groups = (max(IN_REGISTERS), (64, 128, 256, -1, None)) if zeros else (MOST_WITHOUT_ZERO_POINTS, (64,))
    if (
        (INTERPRETED or _on_hopper(x.device)) and tokens <= most and group_size in groups
        and in_features % CHUNK == 0 and bits < 8 and torch.float32 not in {x.dtype, *(s.dtype for s in scales)}
        and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and all(aligned)
    ):  # fmt: skip
        return next(tile for most, tile in IN_REGISTERS.items() if tokens <= most)
    return choose_tile(tokens, x.dtype == torch.float32, bits, small)


def _check_device(packed: torch.Tensor) -> None:
    if packed.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"packed is on {packed.device}: the Triton kernels run on CUDA and ROCm devices; on a CPU use "
            "weight_only_linear_reference, or hf_efficient's own operators"
        )


def _check_scales(packed, scale, zero_point, bits, group_size, in_features) -> None:
    check_layout(bits, group_size)
    check_packed(packed, in_features, bits)
    rows = 1 if group_size is None else packed.shape[0]
    shape = (rows, number_of_groups(in_features, group_size))
    for name, tensor, dtypes in (("scale", scale, DTYPES), ("zero_point", zero_point, (torch.uint8,))):
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is one of {dtypes}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: group_size={group_size} and a weight "
                f"[{packed.shape[0]}, {in_features}] need {shape}"
            )
        if tensor.device != packed.device:
            raise ValueError(f"{name} is on {tensor.device}, packed on {packed.device}: allowed is one device")


def _check_input(x, bias, packed, in_features) -> None:
    out_features = packed.shape[0]
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}: allowed is one of {DTYPES}")
    if x.dim() != 2 or x.shape[1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}: allowed is [M, {in_features}]")
    if x.stride(1) != 1 and in_features > 1:
        raise ValueError(f"x has strides {x.stride()}: allowed is a contiguous last dimension")
    if bias is not None:
        if bias.dtype not in DTYPES:
            raise TypeError(f"bias has dtype {bias.dtype}: allowed is one of {DTYPES}")
        if bias.shape != (out_features,) or (out_features > 1 and bias.stride(0) != 1):
            raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is a contiguous [{out_features}]")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.device != packed.device:
            raise ValueError(f"{name} is on {tensor.device}, packed on {packed.device}: allowed is one device")


def _scale_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Strides by row and group; 0 along a dimension of size 1, which is broadcast."""
    if tensor is None:
        return 0, 0
    return tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape))


def _kernel_group(group_size: int | None) -> int:
    return 0 if group_size in (None, -1) else group_size


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    bits: int,
    group_size: int | None,
    in_features: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The weight [N, in_features] in `dtype` (default: that of scale): (code - zero point) * scale in float32, rounded
    once. Arguments and errors as `weight_only_linear`."""
    _check_scales(packed, scale, zero_point, bits, group_size, in_features)
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _dequantize(packed, scale, zero_point, None, dtype, **layout)


def _dequantize(packed, scale, zero_point, codebook, dtype, *, bits, group_size, in_features) -> torch.Tensor:
    _check_device(packed)
    dtype = scale.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise TypeError(f"dtype={dtype}: allowed is one of {DTYPES}")
    out = torch.empty(packed.shape[0], in_features, dtype=dtype, device=packed.device)
    block_n = 64
    with _on(packed.device):
        dequantize_kernel[(triton.cdiv(in_features, step_columns(bits)), triton.cdiv(packed.shape[0], block_n))](
            packed, scale, zero_point, codebook, out, packed.shape[0], in_features, *_scale_strides(scale),
            *_scale_strides(zero_point), BITS=bits, GROUP=_kernel_group(group_size), ASYMMETRIC=zero_point is not None,
            LOOKUP=_lookup(codebook, dtype), PER_ROW=codebook is not None and codebook.dim() == 2, PTX=PTX,
            BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out


def _on(device: torch.device):
    """Triton launches on the current device."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def weight_only_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, bits: int, group_size: int | None, in_features: int,
) -> torch.Tensor:  # fmt: skip
    """x @ W^T + bias with a packed weight of 2, 3, 4 or 8 bits.

    x: [M, K] float16, bfloat16 or float32, K = in_features contiguous, rows at any stride.
    packed: int32 [N, W] from `pack_weight`.
    scale: [N, G], G = ceil(K / group_size), float of any kind, any strides (contiguous ones of 16 bits are
        read fastest); [N, 1] for group_size -1, [1, 1] for group_size None.
    zero_point: uint8 like scale, values up to 2^bits - 1; None = 2^(bits - 1).
    bias: [N], float of any kind, or None.
    bits: 2, 3, 4 or 8. group_size: 32, 64, a multiple of 128, -1 (one group a row) or None (one scale for the tensor).

    Returns [M, N] in the dtype of x. Products are added in float32 and weights are not rounded, except above 192
    tokens (launch_configs.DEQUANTIZE_ABOVE), where (code - zero point) * scale is rounded to the dtype of x and torch
    multiplies. Results do not depend on the order in which programs run; no synchronisation, so it can be captured in
    a CUDA graph. float32 products use no TF32.

    x and bias may require grad (the backward pass dequantizes the weight and multiplies with torch); the scale may
    not.

    Raises TypeError for dtypes, ValueError for shapes, strides, devices, bits and group sizes that are not served, and
    RuntimeError when scale requires grad while grad is enabled.
    """
    _check_scales(packed, scale, zero_point, bits, group_size, in_features)
    _check_input(x, bias, packed, in_features)
    _check_device(packed)

    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _differentiable(x, bias, packed, scale, zero_point, None, layout)


def _differentiable(x, bias, packed, scale, zero_point, codebook, layout) -> torch.Tensor:
    """The product of checked arguments, with the gradients of x and bias."""
    if needs_gradient(x, bias, scale=scale, codebook=codebook):
        tensors = packed, scale, zero_point, codebook
        return FrozenWeightProduct.apply(x, bias, _product, _dequantize, tensors, layout)
    return _multiply(x, packed, scale, zero_point, bias, codebook, **layout)


def _product(x, bias, packed, scale, zero_point, codebook, **layout):
    return _multiply(x, packed, scale, zero_point, bias, codebook, **layout)


def _multiply(x, packed, scale, zero_point, bias, codebook=None, *, bits, group_size, in_features) -> torch.Tensor:
    """The product of checked arguments: chooses the kernel by the number of tokens and launches it."""
    out_features = packed.shape[0]
    tokens = x.shape[0]
    if tokens > DEQUANTIZE_ABOVE:
        layout = dict(bits=bits, group_size=group_size, in_features=in_features)
        weight = _dequantize(packed, scale, zero_point, codebook, x.dtype, **layout)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    out = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    if codebook is None:
        tile = few_tokens_tile(x, (scale,), (zero_point,), bits, group_size, _has_small_tiles(x.device))
    else:
        tile = choose_tile(tokens, x.dtype == torch.float32, bits, _has_small_tiles(x.device))
    row_blocks, token_blocks = triton.cdiv(out_features, tile.block_n), triton.cdiv(tokens, tile.block_m)
    tensors = (x, packed, scale, zero_point, codebook, bias, out)
    sizes = (tokens, out_features, in_features, x.stride(0), *_scale_strides(scale), *_scale_strides(zero_point))
    options = dict(
        HAS_BIAS=bias is not None,
        LOOKUP=_lookup(codebook, x.dtype),
        PER_ROW=codebook is not None and codebook.dim() == 2,
        **_options(tile, x, bits, group_size, in_features, zero_point),
    )
    with _on(x.device):
        if not tile.programs_per_processor:
            many_tokens_kernel[(token_blocks, row_blocks)](*tensors, *sizes, **options)
            return out
        steps = triton.cdiv(in_features, step_columns(bits))
        programs, shape = row_blocks * token_blocks, (tokens, out_features)
        per_split, splits, partial, arrivals = split(tile, programs, steps, shape, torch.float32, x.device)
        few_tokens_kernel[(row_blocks, token_blocks, splits)](
            *tensors, partial, arrivals, *sizes, per_split, SPLIT=splits > 1, **options, **register_options(tile)
        )
    return out


def register_options(tile: Tile) -> dict:
    """The constants of the kernels for few tokens."""
    if not isinstance(tile, RegisterTile):
        return dict(WARPS=0, EXCHANGE=False)
    return dict(WARPS=tile.num_warps, EXCHANGE=tile.exchange)


def _options(tile, x, bits, group_size, in_features, zero_point) -> dict:
    """The arguments by keyword of every kernel that multiplies."""
    return dict(
        magic=MAGIC_FLOAT16 if x.dtype == torch.float16 else MAGIC_BFLOAT16, BITS=bits, GROUP=_kernel_group(group_size),
        ASYMMETRIC=zero_point is not None, EVEN_K=in_features % COLUMNS == 0, PTX=PTX,
        QUADS=quads(x.device, tile.block_m), BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=tile.num_warps, num_stages=stages(tile, bits),
    )  # fmt: skip


def _lookup(codebook, dtype) -> int:
    if codebook is None:
        return 0
    return (PERMUTE if dtype != torch.float32 and (PTX or INTERPRETED) else GATHER).value
