"""Fake quantization (Jacob et al., https://arxiv.org/abs/1712.05877) of a weight that is trained, and the gradients of
LSQ (https://arxiv.org/abs/1902.08153): one launch each.

What a weight rounds to, and the gradient that it gets, equal those of torch's operators (a zero may have another sign):
each operation is rounded. `LAUNCH` keeps compilers from making one of a product and a sum.
"""

import numbers

import torch
import triton
import triton.language as tl

from .weight_only import DTYPES, INTERPRETED, _on


ELEMENTS = 2048  # of a tile: 16 a thread
MOST = 2**30  # groups, and columns: their numbers are 32-bit integers
LARGEST_CODE = 2**21  # `round_half_to_even` is right up to twice that
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def round_half_to_even(x):
    """float32 within +-2^22 -> the nearest integer in float32: the sum with 1.5 * 2^23 has an ulp of 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def groups_of_program(K, width, groups, count, GROUPS: tl.constexpr):
    """The groups of this program, [GROUPS]: index, whether there is such a group, row, number in its row, offset of its
    first weight (int64), and columns from there to the end of the row."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row = group // groups
    in_row = group - row * groups
    first = in_row * width
    return group, group < count, row.to(tl.int64), in_row, row.to(tl.int64) * K + first, K - first


@triton.jit
def steps_of_groups(
    scale_ptr, zero_ptr, zero_value, row, in_row, exists, scale_row, scale_group, zero_row, zero_group,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """(scale, 1 / scale or 0 where that is not finite, zero point) of groups, float32 [GROUPS]."""
    scale = tl.load(scale_ptr + row * scale_row + in_row * scale_group, mask=exists, other=1.0)
    inverse = tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), scale)
    inverse = tl.where(tl.abs(inverse) < INFINITY, inverse, 0.0)
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + row * zero_row + in_row * zero_group, mask=exists, other=0.0)
    else:
        zero = tl.full((GROUPS,), 0.0, tl.float32) + zero_value
    return scale, inverse, zero


@triton.jit
def fake_quantize_weight_kernel(
    weight_ptr, scale_ptr, zero_ptr, rounded_ptr, zero_value, low, high, K, width, groups, count, scale_row,
    scale_group, zero_row, zero_group, IN_DTYPE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (count / GROUPS, width / BLOCK). IN_DTYPE: every operation that makes weights of codes is rounded to the
    dtype of `rounded`."""
    DTYPE: tl.constexpr = rounded_ptr.dtype.element_ty
    _, exists, row, in_row, start, left = groups_of_program(K, width, groups, count, GROUPS)
    scale, inverse, zero = steps_of_groups(
        scale_ptr, zero_ptr, zero_value, row, in_row, exists, scale_row, scale_group, zero_row, zero_group, GROUPS
    )
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = exists[:, None] & (columns < width)[None, :] & (columns[None, :] < left[:, None])
    weight = tl.load((weight_ptr + start)[:, None] + columns[None, :], mask=inside, other=0.0)
    position = weight * inverse[:, None] + zero[:, None]
    code = round_half_to_even(tl.clamp(position, low, high, propagate_nan=tl.PropagateNan.ALL))
    if IN_DTYPE:
        code, zero, scale = code.to(DTYPE).to(tl.float32), zero.to(DTYPE).to(tl.float32), scale.to(DTYPE).to(tl.float32)
    steps = code - zero[:, None]
    if IN_DTYPE:
        steps = steps.to(DTYPE).to(tl.float32)
    tl.store((rounded_ptr + start)[:, None] + columns[None, :], (steps * scale[:, None]).to(DTYPE), mask=inside)


@triton.jit
def fake_quantize_gradients_kernel(
    weight_ptr, scale_ptr, zero_ptr, rounded_ptr, gradient_ptr, passed_ptr, of_scale_ptr, zero_value, low, high, K,
    width, groups, count, scale_row, scale_group, zero_row, zero_group, PASSES_ALL: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (count / GROUPS,). low, high: positions from which on a weight is cut off."""
    group, exists, row, in_row, start, left = groups_of_program(K, width, groups, count, GROUPS)
    _, inverse, zero = steps_of_groups(
        scale_ptr, zero_ptr, zero_value, row, in_row, exists, scale_row, scale_group, zero_row, zero_group, GROUPS
    )
    total = tl.zeros((GROUPS, BLOCK), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = exists[:, None] & (columns < width)[None, :] & (columns[None, :] < left[:, None])
        weight = tl.load((weight_ptr + start)[:, None] + columns[None, :], mask=inside, other=0.0)
        rounded = tl.load((rounded_ptr + start)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load((gradient_ptr + start)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        position = weight * inverse[:, None] + zero[:, None]
        uncut = tl.where((position <= low) | (position >= high), 0.0, gradient)
        total += rounded * gradient - uncut * weight
        passed = gradient if PASSES_ALL else uncut
        tl.store((passed_ptr + start)[:, None] + columns[None, :], passed, mask=inside)
    tl.store(of_scale_ptr + group, tl.sum(total, axis=1), mask=exists)


def fake_quantize_weight(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, *, low: int, high: int, group_size: int,
    dtype: torch.dtype, work: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """The values [N, K] in `dtype` of the nearest codes of a weight: (code - zero) * scale, where code is
    round-half-to-even(weight * (1 / scale) + zero), clamped.

    weight: float32 [N, K], contiguous.
    scale: float32, broadcasts to [N, ceil(K / group_size)], any strides; at a scale of 0 (or whose inverse is not
        finite) a weight counts as 0.
    zero: float32 tensor that broadcasts alike, or a number.
    low, high: the lowest and the highest code, within +-2^21.
    group_size: columns of a group; the last group of a row may have fewer.
    dtype: float16, bfloat16 or float32.
    work: `dtype`, where each operation that makes values of codes is rounded to it, the zero point too, or float32.

    A NaN stays one. Raises ValueError for dtypes, shapes, strides, devices and codes that are not served.
    """
    groups = _check(weight, scale, zero, low, high, group_size)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: allowed is one of {DTYPES}")
    if work not in (dtype, torch.float32):
        raise ValueError(f"work={work}: allowed is {dtype}, as dtype, or torch.float32")
    rounded = torch.empty_like(weight, dtype=dtype)
    if weight.numel():
        tile, tensors, sizes, strides = _launch(weight, scale, zero, group_size, groups)
        grid = triton.cdiv(len(weight) * groups, tile["GROUPS"]), triton.cdiv(sizes[1], tile["BLOCK"])
        with _on(weight.device):
            fake_quantize_weight_kernel[grid](
                *tensors, rounded, _number(zero), float(low), float(high), *sizes, *strides,
                IN_DTYPE=work is not torch.float32, **tile, **LAUNCH,
            )  # fmt: skip
    return rounded


def fake_quantize_gradients(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, rounded: torch.Tensor,
    gradient: torch.Tensor, *, low: int, high: int, group_size: int, passes_all: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """From the gradient of what `fake_quantize_weight` returns, those of the weight, float32 [N, K], and of the
    logarithms of the scales, float32 [N, ceil(K / group_size)].

    The gradient passes the rounding straight through, and is 0 where a weight lies half a step or more outside the
    codes. That of a scale is the sum over its group of rounded * gradient - passed * weight, which is LSQ's times the
    scale; its terms are added in float32, in the same order in every run.

    rounded: [N, K] float16, bfloat16 or float32, contiguous; gradient: alike.
    passes_all: whether the gradient of the weight passes where it is cut off, too (that of the scale is the same).

    Other arguments and errors as `fake_quantize_weight`.
    """
    groups = _check(weight, scale, zero, low, high, group_size)
    _check_like("rounded", rounded, weight, DTYPES)
    _check_like("gradient", gradient, weight, (rounded.dtype,))
    passed = torch.empty_like(weight)
    of_scale = torch.empty(len(weight), groups, dtype=torch.float32, device=weight.device)
    if weight.numel():
        tile, tensors, sizes, strides = _launch(weight, scale, zero, group_size, groups)
        with _on(weight.device):
            fake_quantize_gradients_kernel[(triton.cdiv(of_scale.numel(), tile["GROUPS"]),)](
                *tensors, rounded, gradient, passed, of_scale, _number(zero), low - 0.5, high + 0.5, *sizes, *strides,
                PASSES_ALL=passes_all, **tile, **LAUNCH,
            )  # fmt: skip
    return passed, of_scale


def tile_of(width: int) -> dict[str, int]:
    """GROUPS and BLOCK columns of a tile, for groups of `width` columns."""
    block = min(triton.next_power_of_2(width), ELEMENTS)
    return {"GROUPS": ELEMENTS // block, "BLOCK": block}


def _number(zero) -> float:
    return 0.0 if isinstance(zero, torch.Tensor) else float(zero)


def _launch(weight, scale, zero, group_size: int, groups: int):
    """Checked arguments -> (tile, tensors that are read, sizes, strides), as the kernels take them."""
    is_tensor, shape, width = isinstance(zero, torch.Tensor), (len(weight), groups), min(group_size, weight.shape[1])
    zero_strides = zero.expand(shape).stride() if is_tensor else (0, 0)
    sizes = weight.shape[1], width, groups, len(weight) * groups
    strides = *scale.expand(shape).stride(), *zero_strides
    return tile_of(width), (weight, scale, zero if is_tensor else None), sizes, strides


def _check(weight, scale, zero, low, high, group_size) -> int:
    """Raises for what is not served. Returns the number of groups in a row."""
    if weight.dtype != torch.float32 or weight.dim() != 2 or not weight.is_contiguous():
        given = f"{weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}"
        raise ValueError(f"weight is {given}: allowed is torch.float32 [N, K], contiguous")
    if weight.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"weight is on {weight.device}: the Triton kernels run on CUDA and ROCm devices")
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size={group_size!r}: allowed is an integer from 1")
    if not -LARGEST_CODE <= low <= high <= LARGEST_CODE:
        raise ValueError(f"low={low}, high={high}: allowed is low <= high, both within +-{LARGEST_CODE}")
    groups = triton.cdiv(weight.shape[1], group_size)
    if max(len(weight) * groups, weight.shape[1]) > MOST:
        given = f"weight {tuple(weight.shape)} with group_size={group_size} has {len(weight) * groups} groups"
        raise ValueError(f"{given}: allowed are at most {MOST} groups, and as many columns")
    _check_groups("scale", scale, weight, groups)
    if isinstance(zero, torch.Tensor):
        _check_groups("zero", zero, weight, groups)
    elif not isinstance(zero, numbers.Real):
        raise ValueError(f"zero={zero!r}: allowed is a number or a tensor")
    return groups


def _check_groups(name: str, tensor: torch.Tensor, weight: torch.Tensor, groups: int) -> None:
    allowed = f"torch.float32 on {weight.device}"
    if tensor.dtype != torch.float32 or tensor.device != weight.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: allowed is {allowed}")
    shape = [len(weight), groups]
    if tensor.dim() != 2 or any(own not in (1, asked) for own, asked in zip(tensor.shape, shape)):
        raise ValueError(f"{name} {list(tensor.shape)} does not broadcast to {shape}")


def _check_like(name: str, tensor: torch.Tensor, weight: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != weight.shape or not tensor.is_contiguous():
        given = f"{list(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} {given}: it must be {list(weight.shape)}, without gaps")
    if tensor.dtype not in dtypes or tensor.device != weight.device:
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: it must be {allowed} on {weight.device}")
