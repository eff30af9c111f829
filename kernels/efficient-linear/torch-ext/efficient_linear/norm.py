"""The sum with the residual and its RMS norm (https://arxiv.org/abs/1910.07467), one launch."""

import torch
import triton
import triton.language as tl

from .activation_quant import WIDEST, check_rows
from .weight_only import _on


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, K, stride_x, stride_residual, eps, BLOCK: tl.constexpr
):
    """Grid (rows,), BLOCK >= K."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * stride_residual + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(DTYPE)
        tl.store(sum_ptr + row * K + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    x = x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / K + eps))
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + columns, (x.to(DTYPE).to(tl.float32) * weight).to(DTYPE), mask=inside)


def add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """x [M, K] (+ residual [M, K], rounded to the dtype of x), and its RMS norm, rounded, times weight [K], rounded
    again, as transformers' Llama computes them.

    x, residual: float16, bfloat16 or float32; columns contiguous, K up to 65536. weight: of the dtype of x.

    Returns (sum or None without a residual, normalised rows), both [M, K] and contiguous.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served.
    """
    check_rows("x", x)
    if residual is not None:
        check_rows("residual", residual, x)
    if not 1 <= x.shape[1] <= WIDEST:
        raise ValueError(f"x has {x.shape[1]} columns: allowed are 1 to {WIDEST}")
    if weight.shape != (x.shape[1],) or weight.dtype != x.dtype or weight.device != x.device:
        raise ValueError(
            f"weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}: allowed is {x.dtype} [{x.shape[1]}] "
            f"on {x.device}, as x"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(out)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        with _on(x.device):
            add_rms_norm_kernel[(len(x),)](
                x, residual, weight.contiguous(), total, out, x.shape[1], x.stride(0),
                0 if residual is None else residual.stride(0), eps, BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
            )  # fmt: skip
    return total, out
