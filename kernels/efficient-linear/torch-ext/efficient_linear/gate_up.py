"""silu(x Wg^T + bg) * (x Wu^T + bu) of two packed weights of one shape: in one launch for few tokens."""

import torch
import torch.nn.functional as F
import triton

from .gate_up_kernels import gate_up_kernel
from .packing import step_columns
from .split_k import split
from .weight_only import (
    _check_device,
    _check_input,
    _check_scales,
    _has_small_tiles,
    _on,
    _options,
    _scale_strides,
    few_tokens_tile,
    register_options,
    weight_only_linear,
)


FUSED_TOKENS = 64  # the most tokens of one block, for which K may be split


def gate_up_silu(
    x: torch.Tensor, gate: tuple, up: tuple, *, bits: int, group_size: int | None, in_features: int
) -> torch.Tensor:
    """The gated half of a feed-forward layer (SwiGLU, https://arxiv.org/abs/2002.05202).

    x: [M, K] as in `weight_only_linear`.
    gate, up: (packed, scale, zero_point or None, bias or None) as there; alike in shapes, in having zero points and in
        having a bias.

    Returns silu(gate product) * up product, [M, N] in the dtype of x. Up to 64 tokens both products, silu and their
    product are float32 in one launch and rounded once; above, or when grad is needed, they are two products of
    `weight_only_linear`, rounded, and silu and the product in torch.

    Raises TypeError and ValueError as `weight_only_linear`, and ValueError when gate and up differ.
    """
    for name, tensors in (("gate", gate), ("up", up)):
        if len(tensors) != 4:
            raise ValueError(f"{name} has {len(tensors)} elements: allowed is (packed, scale, zero_point, bias)")
    for name, ours, theirs in zip(("packed", "scale", "zero_point", "bias"), gate, up):
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} of gate has shape {shapes[0]}, of up {shapes[1]}: allowed is one shape")
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, gate[1], gate[3], up[1], up[3])
    )
    if needs_grad or x.shape[0] > FUSED_TOKENS:
        return F.silu(weight_only_linear(x, *gate, **layout)) * weight_only_linear(x, *up, **layout)
    for packed, scale, zero_point, bias in (gate, up):
        _check_scales(packed, scale, zero_point, bits, group_size, in_features)
        _check_input(x, bias, packed, in_features)
        _check_device(packed)

    tokens, out_features = x.shape[0], gate[0].shape[0]
    out = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = few_tokens_tile(x, (gate[1], up[1]), (gate[2], up[2]), bits, group_size, _has_small_tiles(x.device))
    row_blocks, token_blocks = triton.cdiv(out_features, tile.block_n), triton.cdiv(tokens, tile.block_m)
    steps = triton.cdiv(in_features, step_columns(bits))
    with _on(x.device):
        programs, shape = row_blocks * token_blocks, (2, tokens, out_features)
        per_split, splits, partial, arrivals = split(tile, programs, steps, shape, torch.float32, x.device)
        gate_up_kernel[(row_blocks, token_blocks, splits)](
            x, *gate, *up, out, partial, arrivals, tokens, out_features, in_features, x.stride(0),
            *(stride for tensor in (gate[1], gate[2], up[1], up[2]) for stride in _scale_strides(tensor)), per_split,
            SPLIT=splits > 1, HAS_BIAS=gate[3] is not None,
            **_options(tile, x, bits, group_size, in_features, gate[2]), **register_options(tile),
        )  # fmt: skip
    return out
