"""Activations to 8-bit codes, alone or with the operation before them: checks and launch."""

import functools
from typing import NamedTuple

import torch
import triton

from .activation_quant_kernels import GROUP, quantize_rows_kernel
from .weight_only import DTYPES, INTERPRETED, _on


FORMATS = ("int8", "int8_asymmetric", "fp8", "fp8_block")
WIDEST = 65536  # a row lies in the registers of one program


class Quantized(NamedTuple):
    """codes [M, K] int8 or float8_e4m3fn, contiguous; scale float32 [M, 1], [M, ceil(K / 128)] (fp8_block) or the
    static one; zero_point int8 [M, 1], the static one, or None. x is about (codes - zero_point) * scale."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether Triton has float8_e4m3fn conversions and products on this device (NVIDIA from compute capability 8.9)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def check_rows(name: str, tensor: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Raises for what is not [M, K] of floats with contiguous columns on a device that runs Triton."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is one of {DTYPES}")
    if tensor.dim() != 2 or (like is not None and tensor.shape != like.shape):
        allowed = "[M, K]" if like is None else f"that of x, {tuple(like.shape)}"
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: allowed is {allowed}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}: allowed is a contiguous last dimension")
    if like is not None and (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: allowed is {like.dtype} on {like.device} as x")
    if tensor.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"{name} is on {tensor.device}: the Triton kernels run on CUDA and ROCm devices")


def _check_format(x, format, scale, zero_point) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: allowed is one of {FORMATS}")
    if not 1 <= x.shape[1] <= WIDEST:
        raise ValueError(f"x has {x.shape[1]} columns: allowed are 1 to {WIDEST}")
    if format == "fp8_block" and scale is not None:
        raise ValueError("format='fp8_block' has a scale for every block of 128 columns: scale must be None")
    if (zero_point is not None) != (scale is not None and format == "int8_asymmetric"):
        raise ValueError("zero_point belongs to a static scale of format='int8_asymmetric', and only to that")
    for name, tensor, dtype in (("scale", scale, torch.float32), ("zero_point", zero_point, torch.int8)):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.numel() != 1 or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
                f"allowed is one {dtype} on {x.device}"
            )


def _quantize(source, x, other, weight, eps, format, scale, zero_point, normalised):
    """Checked arguments -> (Quantized, residual or None, normalised or None)."""
    rows, columns = x.shape
    fp8 = format in ("fp8", "fp8_block")
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn if fp8 else torch.int8, device=x.device)
    dynamic_scale = dynamic_zero = None
    if scale is None:
        groups = triton.cdiv(columns, GROUP) if format == "fp8_block" else 1
        dynamic_scale = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
        if format == "int8_asymmetric":
            dynamic_zero = torch.empty(rows, 1, dtype=torch.int8, device=x.device)
    residual = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if weight is not None and other is not None else None
    )
    normalised = torch.empty_like(x, memory_format=torch.contiguous_format) if normalised else None
    if rows:
        block = max(triton.next_power_of_2(columns), GROUP)
        with _on(x.device):
            quantize_rows_kernel[(rows,)](
                x, other, weight, scale, zero_point, codes.view(torch.uint8) if fp8 else codes, dynamic_scale,
                dynamic_zero, residual, normalised, columns, x.stride(0), 0 if other is None else other.stride(0), eps,
                SOURCE=source, FORMAT=format, NATIVE_FP8=has_fp8(x.device), BLOCK=block,
                num_warps=min(max(block // 512, 1), 16),
            )  # fmt: skip
    scale, zero_point = (dynamic_scale, dynamic_zero) if scale is None else (scale, zero_point)
    return Quantized(codes, scale, zero_point), residual, normalised


def quantize(
    x: torch.Tensor, format: str, scale: torch.Tensor | None = None, zero_point: torch.Tensor | None = None
) -> Quantized:
    """x [M, K] (float16, bfloat16, float32; columns contiguous, K up to 65536) to 8-bit codes.

    format: "int8" (symmetric, one scale a row: largest magnitude / 127), "int8_asymmetric" (range / 255, which always
        holds 0), "fp8" (float8_e4m3fn, largest magnitude / 448) or "fp8_block" (one scale for 128 columns of a row).
    scale: one float32 for the tensor makes the quantization static (not for "fp8_block"); codes outside the range are
        clamped. zero_point: one int8, with a static scale of "int8_asymmetric".

    Codes are round-half-to-even(x * (1 / scale)) (+ zero point) in float32. A row that holds infinity or NaN has a
    scale of infinity or NaN and codes without meaning, so that products with it are not finite.

    Raises TypeError or ValueError for dtypes, shapes, strides, devices and formats that are not served.
    """
    check_rows("x", x)
    _check_format(x, format, scale, zero_point)
    return _quantize("plain", x, None, None, 0.0, format, scale, zero_point, False)[0]


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, *, format: str,
    scale: torch.Tensor | None = None, zero_point: torch.Tensor | None = None, normalised: bool = False,
) -> tuple[Quantized, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """`quantize` of the RMS norm of x [M, K] (+ residual [M, K]) times weight [K], computed in float32 without a
    rounding in between, in one pass over memory.

    Returns (Quantized, x + residual rounded to the dtype of x, the normalised rows in the dtype of x); the second is
    None without a residual, the third unless `normalised`. Other arguments and errors as `quantize`.
    """
    check_rows("x", x)
    if residual is not None:
        check_rows("residual", residual, x)
    if weight.shape != (x.shape[1],) or weight.dtype not in DTYPES or weight.device != x.device:
        raise ValueError(
            f"weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}: allowed is [{x.shape[1]}] of floats "
            f"on {x.device}"
        )
    _check_format(x, format, scale, zero_point)
    return _quantize("rms_norm", x, residual, weight.contiguous(), eps, format, scale, zero_point, normalised)


def silu_mul_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    format: str,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> Quantized:
    """`quantize` of silu(gate) * up, both [M, K] (any row stride: halves of one product), computed in float32 without a
    rounding in between, in one pass over memory. Other arguments and errors as `quantize`."""
    check_rows("gate", gate)
    check_rows("up", up, gate)
    _check_format(gate, format, scale, zero_point)
    return _quantize("silu_mul", gate, up, None, 0.0, format, scale, zero_point, False)[0]
