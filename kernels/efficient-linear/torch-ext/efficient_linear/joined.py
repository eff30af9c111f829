"""Products of several weights with the same few tokens, each in one launch: checks and launch."""

from collections.abc import Sequence

import torch
import triton

from .gate_up import FUSED_TOKENS
from .joined_kernels import gate_up_dense_kernel, joined_dense_kernel, joined_few_tokens_kernel
from .launch_configs import DenseTile, choose_dense_tile
from .packing import step_columns
from .split_k import split
from .weight_only import (
    INTERPRETED,
    _check_device,
    _check_input,
    _check_scales,
    _on,
    _on_hopper,
    _options,
    _scale_strides,
    few_tokens_tile,
    register_options,
)


MOST_WEIGHTS = 3  # of one launch


def check_joined(weights: int, tokens: int) -> None:
    """Raises ValueError for what is not multiplied in one launch."""
    if not 2 <= weights <= MOST_WEIGHTS:
        raise ValueError(f"{weights} weights: allowed are 2 to {MOST_WEIGHTS}")
    if tokens > FUSED_TOKENS:
        raise ValueError(f"x has {tokens} rows: allowed are at most {FUSED_TOKENS}")


def _check_alike(name: str, values: Sequence) -> None:
    if any(value != values[0] for value in values):
        raise ValueError(f"{name} differs among the weights, {values}: allowed is one")


def _strides(packed: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """`_scale_strides` of each weight's tensor. A weight of one row takes the row stride of the others."""
    strides = [_scale_strides(tensor) for tensor in tensors]
    row = next((stride for (stride, _), weight in zip(strides, packed) if len(weight) > 1), 0)
    return [(row if len(weight) == 1 else own, group) for (own, group), weight in zip(strides, packed)]


def _three(tensors: Sequence) -> tuple:
    """Filled up with the last one."""
    return *tensors, *[tensors[-1]] * (MOST_WEIGHTS - len(tensors))


def joined_weight_only_linear(
    x: torch.Tensor, weights: Sequence[tuple], *, bits: int, group_size: int | None, in_features: int
) -> list[torch.Tensor]:
    """The products of `weight_only_linear` of x [M, K], M at most 64, with two or three weights in one launch.

    weights: (packed, scale, zero_point or None, bias or None) as there; alike in having zero points and a bias, and in
        the dtypes and strides of their scales.

    Returns one [M, N] a weight, in the dtype of x.

    Raises TypeError and ValueError as `weight_only_linear`, and ValueError for weights that differ or too many tokens.
    """
    check_joined(len(weights), x.shape[0])
    for packed, scale, zero_point, bias in weights:
        _check_scales(packed, scale, zero_point, bits, group_size, in_features)
        _check_input(x, bias, packed, in_features)
        _check_device(packed)
    packed, scales, zeros, biases = zip(*weights)
    _check_alike("zero_point", [zero is not None for zero in zeros])
    _check_alike("bias", [bias if bias is None else bias.dtype for bias in biases])
    strides = list(zip(_strides(packed, scales), _strides(packed, zeros)))
    _check_alike("scale", list(zip([scale.dtype for scale in scales], strides)))
    sizes = [len(each) for each in packed]
    outs = [torch.empty(len(x), size, dtype=x.dtype, device=x.device) for size in sizes]
    if len(x) == 0:
        return outs
    tile = few_tokens_tile(x, scales, zeros, bits, group_size)
    row_blocks, token_blocks = sum(triton.cdiv(size, tile.block_n) for size in sizes), triton.cdiv(len(x), tile.block_m)
    steps = triton.cdiv(in_features, step_columns(bits))
    with _on(x.device):
        per_split, splits, partial, arrivals = split(
            tile, row_blocks * token_blocks, steps, (len(x), sum(sizes)), torch.float32, x.device
        )
        joined_few_tokens_kernel[(row_blocks, token_blocks, splits)](
            x, *_three(packed), *_three(scales), *_three(zeros), *_three(biases), *_three(outs), partial, arrivals,
            len(x), *_three(sizes), in_features, x.stride(0), *strides[0][0], *strides[0][1], per_split,
            COUNT=len(sizes), SPLIT=splits > 1, HAS_BIAS=biases[0] is not None,
            **_options(tile, x, bits, group_size, in_features, zeros[0]), **register_options(tile),
        )  # fmt: skip
    return outs


def _check_dense(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence) -> None:
    if len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights: allowed is one, or None, for each")
    for weight, bias in zip(weights, biases):
        if weight.dtype != x.dtype or weight.dim() != 2 or weight.stride(1) != 1 or 0 in weight.shape:
            raise ValueError(
                f"a weight is {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}: allowed is "
                f"{x.dtype} [N, K], as x, with contiguous columns"
            )
        _check_input(x, bias, weight, weight.shape[1])
        _check_device(weight)
    _check_alike("the row stride", [weight.stride(0) for weight in weights])
    _check_alike("bias", [bias if bias is None else bias.dtype for bias in biases])


def _dense_launch(x, tile: DenseTile, rows: Sequence[int], programs_of: Sequence[int], weight):
    """(grid, (partial sums, arrival counters), what both kernels of dense weights take by keyword). rows: of the sums
    of a token. programs_of: rows of the weights that programs share."""
    row_blocks = sum(triton.cdiv(size, tile.block_n) for size in programs_of)
    token_blocks, steps = triton.cdiv(len(x), tile.block_m), triton.cdiv(weight.shape[1], tile.block_k)
    per_split, splits, partial, arrivals = split(
        tile, row_blocks * token_blocks, steps, (*rows[:-1], len(x), rows[-1]), torch.float32, x.device
    )
    options = dict(
        steps_per_split=per_split, EVEN_K=weight.shape[1] % tile.block_k == 0, SPLIT=splits > 1, BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, UPCAST=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=tile.num_warps, num_stages=min(tile.num_stages, 3) if torch.version.hip else tile.num_stages,
    )  # fmt: skip
    return (row_blocks, token_blocks, splits), (partial, arrivals), options


def joined_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """x [M, K], M at most 64, times the transposes of two or three dense weights [N, K], plus their biases [N], in one
    launch. x and the weights have one dtype, float16, bfloat16 or float32 (without TF32), contiguous columns, and the
    weights one row stride; all have a bias, or none.

    Returns one [M, N] a weight, in the dtype of x, added in float32 and rounded once.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served.
    """
    check_joined(len(weights), x.shape[0])
    _check_dense(x, weights, biases)
    sizes = [len(weight) for weight in weights]
    outs = [torch.empty(len(x), size, dtype=x.dtype, device=x.device) for size in sizes]
    if len(x) == 0:
        return outs
    tile = choose_dense_tile(len(x), x.dtype == torch.float32, on_hopper=_on_hopper(x.device))
    with _on(x.device):
        grid, sums, options = _dense_launch(x, tile, [sum(sizes)], sizes, weights[0])
        joined_dense_kernel[grid](
            x, *_three(weights), *_three(biases), *_three(outs), *sums, len(x), *_three(sizes), x.shape[1], x.stride(0),
            weights[0].stride(0), COUNT=len(sizes), HAS_BIAS=biases[0] is not None, **options,
        )  # fmt: skip
    return outs


def gate_up_silu_dense(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """silu(x gate^T + its bias) * (x up^T + its bias) of x [M, K], M at most 64, and dense weights [N, K] in one
    launch: [M, N], computed in float32 and rounded once. Other arguments and errors as `joined_linear`."""
    check_joined(2, x.shape[0])
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}: allowed is one shape")
    _check_dense(x, (gate, up), (gate_bias, up_bias))
    out = torch.empty(len(x), len(gate), dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return out
    tile = choose_dense_tile(len(x), x.dtype == torch.float32, True, _on_hopper(x.device))
    with _on(x.device):
        grid, sums, options = _dense_launch(x, tile, [2, len(gate)], [len(gate)], gate)
        gate_up_dense_kernel[grid](
            x, gate, up, gate_bias, up_bias, out, *sums, len(x), len(gate), x.shape[1], x.stride(0), gate.stride(0),
            HAS_BIAS=gate_bias is not None, **options,
        )  # fmt: skip
    return out
