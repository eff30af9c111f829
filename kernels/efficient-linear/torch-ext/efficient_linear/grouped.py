"""Mixture of experts: every row of x times the packed weight of its own expert, in one launch."""

import torch
import triton
import triton.language as tl

from .fragments import MAGIC_BFLOAT16, MAGIC_FLOAT16
from .launch_configs import choose_tile, stages
from .packing import COLUMNS
from .reference import weight_only_linear_reference
from .weight_only import (
    DTYPES,
    INTERPRETED,
    PTX,
    _check_device,
    _check_scales,
    _kernel_group,
    _on,
    _scale_strides,
    dequantize,
    quads,
)  # fmt: skip
from .weight_only_kernels import accumulate, add_bias_and_store


@triton.jit(do_not_specialize=["magic"])
def grouped_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, offsets_ptr, N, K, stride_x, stride_packed, stride_se,
    stride_sn, stride_sg, stride_ze, stride_zn, stride_zg, magic, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr, PTX: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks * row blocks): the token blocks of expert 0, then those of expert 1 ..., as many as the rows
    of each need, found from offsets int32 [E + 1]; the blocks behind the last one have nothing to do. Row blocks of one
    token block are neighbours in time: they share its tokens, and every weight is read once where its expert has up to
    BLOCK_M rows. (The second dimension of a grid ends at 65535.)"""
    row_blocks = tl.cdiv(N, BLOCK_N)
    row_block, token_block = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    experts = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    blocks = tl.cumsum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum((blocks <= token_block).to(tl.int32), 0)
    if expert >= E:
        return
    token_block -= tl.max(tl.where(experts < expert, blocks, 0), 0)
    first = tl.load(offsets_ptr + expert).to(tl.int64)
    rows_of_expert = (tl.load(offsets_ptr + expert + 1) - first).to(tl.int32)
    expert = expert.to(tl.int64)
    if ASYMMETRIC:
        zero_ptr += expert * stride_ze
    if HAS_BIAS:
        bias_ptr += expert * N
    result = accumulate(
        x_ptr + first * stride_x, packed_ptr + expert * stride_packed, scale_ptr + expert * stride_se, zero_ptr,
        row_block, token_block, 0, (K + 127) // 128, rows_of_expert, N, K, stride_x, stride_sn, stride_sg, stride_zn,
        stride_zg, magic, BITS, GROUP, ASYMMETRIC, EVEN_K, BLOCK_N, BLOCK_M, UPCAST, PTX=PTX, QUADS=QUADS,
    )  # fmt: skip
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    add_bias_and_store(out_ptr + first * N, bias_ptr, result, rows, tokens, rows_of_expert, N, HAS_BIAS)


def grouped_linear_reference(
    x, packed, scale, zero_point=None, bias=None, *, offsets, bits, group_size, in_features
) -> torch.Tensor:
    """`grouped_linear` in float32, one expert after the other."""
    out = torch.zeros(x.shape[0], packed.shape[1], device=x.device)
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:])):
        tensors = (t if t is None else t[expert] for t in (packed, scale, zero_point, bias))
        layout = dict(bits=bits, group_size=group_size, in_features=in_features)
        out[first:last] = weight_only_linear_reference(x[first:last], *tensors, **layout)
    return out


def grouped_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, offsets: torch.Tensor, bits: int, group_size: int | None, in_features: int,
) -> torch.Tensor:  # fmt: skip
    """Rows sorted by expert times the transposed packed weight of their expert, plus its bias.

    x: [R, K] float16, bfloat16 or float32, contiguous last dimension; rows offsets[e] .. offsets[e + 1] belong to
        expert e.
    packed: int32 [E, N, W], a stack of `pack_weight` results. scale: [E, N, G] ([E, 1, 1] for group_size None),
    zero_point: uint8 alike or None, bias: [E, N] or None; the rest as in `weight_only_linear`.
    offsets: int32 [E + 1] on the device of x, from 0 to R and not decreasing: they are not checked, because reading
        them would wait for the GPU.

    Returns [R, N] in the dtype of x. The grid follows from shapes alone, so calls can be captured in a CUDA graph while
    the routing changes. x and bias may require grad (the backward pass reads the offsets back and dequantizes one
    expert at a time).

    Raises TypeError and ValueError as `weight_only_linear`.
    """
    if packed.dim() != 3 or packed.shape[0] < 1:
        raise ValueError(f"packed has shape {tuple(packed.shape)}: allowed is [E, N, W], a stack from pack_weight")
    experts, out_features = packed.shape[:2]
    for name, tensor in (("scale", scale), ("zero_point", zero_point)):
        if tensor is not None and (tensor.dim() != 3 or tensor.shape[0] != experts):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: allowed is [{experts}, N, G]")
    _check_scales(packed[0], scale[0], None if zero_point is None else zero_point[0], bits, group_size, in_features)
    if not packed.is_contiguous():
        raise ValueError(f"packed has strides {packed.stride()}: allowed is a contiguous tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}: allowed is one of {DTYPES}")
    if x.dim() != 2 or x.shape[1] != in_features or (x.stride(1) != 1 and in_features > 1):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}: allowed is [R, {in_features}] with contiguous rows"
        )
    if bias is not None and (tuple(bias.shape) != (experts, out_features) or not bias.is_contiguous()):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is a contiguous [{experts}, {out_features}]")
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (experts + 1,) or not offsets.is_contiguous():
        given = f"{offsets.dtype} of shape {tuple(offsets.shape)} and strides {offsets.stride()}"
        raise ValueError(f"offsets is {given}: allowed is a contiguous torch.int32 [{experts + 1}]")
    for name, tensor in (("x", x), ("bias", bias), ("offsets", offsets)):
        if tensor is not None and tensor.device != packed.device:
            raise ValueError(f"{name} is on {tensor.device}, packed on {packed.device}: allowed is one device")
    _check_device(packed)
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    if torch.is_grad_enabled():
        if scale.requires_grad:
            raise RuntimeError("scale requires grad: allowed are gradients of x and bias, the weight is frozen")
        if x.requires_grad or (bias is not None and bias.requires_grad):
            return _GroupedLinear.apply(x, bias, packed, scale, zero_point, offsets, layout)
    return _multiply(x, packed, scale, zero_point, bias, offsets, **layout)


class _GroupedLinear(torch.autograd.Function):
    """grouped_linear with the gradients of x and bias."""

    @staticmethod
    def forward(ctx, x, bias, packed, scale, zero_point, offsets, layout):
        ctx.save_for_backward(packed, scale, zero_point, offsets)
        ctx.layout, ctx.dtypes = layout, (x.dtype, None if bias is None else bias.dtype)
        return _multiply(x, packed, scale, zero_point, bias, offsets, **layout)

    @staticmethod
    def backward(ctx, grad):
        packed, scale, zero_point, offsets = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        bounds = offsets.tolist()
        grad_x = grad.new_zeros(grad.shape[0], ctx.layout["in_features"], dtype=x_dtype)
        grad_bias = None if bias_dtype is None else grad.new_zeros(packed.shape[:2], dtype=bias_dtype)
        for expert, (first, last) in enumerate(zip(bounds, bounds[1:])):
            if first == last:
                continue
            tensors = packed[expert], scale[expert], None if zero_point is None else zero_point[expert]
            grad_x[first:last] = grad[first:last] @ dequantize(*tensors, dtype=x_dtype, **ctx.layout)
            if grad_bias is not None:
                grad_bias[expert] = grad[first:last].sum(0)
        return grad_x, grad_bias, None, None, None, None, None


def _multiply(x, packed, scale, zero_point, bias, offsets, *, bits, group_size, in_features) -> torch.Tensor:
    experts, out_features = packed.shape[:2]
    rows = x.shape[0]
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tile = choose_tile(max(1, min(256, rows // experts)), x.dtype == torch.float32, bits)
    token_blocks = rows // tile.block_m + min(rows, experts)  # at most: every expert may end in a part of one
    with _on(x.device):
        grouped_kernel[(triton.cdiv(out_features, tile.block_n) * token_blocks,)](
            x, packed, scale, zero_point, bias, out, offsets, out_features, in_features, x.stride(0), packed.stride(0),
            *_expert_strides(scale), *_expert_strides(zero_point),
            magic=MAGIC_FLOAT16 if x.dtype == torch.float16 else MAGIC_BFLOAT16, E=experts,
            BLOCK_E=triton.next_power_of_2(experts), BITS=bits, GROUP=_kernel_group(group_size),
            ASYMMETRIC=zero_point is not None, HAS_BIAS=bias is not None, EVEN_K=in_features % COLUMNS == 0,
            BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, UPCAST=INTERPRETED and x.dtype == torch.bfloat16, PTX=PTX,
            QUADS=quads(x.device), num_warps=tile.num_warps, num_stages=stages(tile, bits),
        )  # fmt: skip
    return out


def _expert_strides(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if tensor is None else (tensor.stride(0), *_scale_strides(tensor[0]))
