"""Products of float8 weights (E4M3, E5M2) and activations (E4M3)."""

import torch

from .activation_quant import has_fp8
from .w8a8 import check_codes, check_devices, check_out, check_per_row, launch
from .w8a8_configs import SCALED_MM_FROM
from .weight_only import INTERPRETED


BLOCK = 128


def _kind(x_scale, w_scale, tokens, out_features, in_features) -> str:
    """ "tensor", "channel" or "block"; raises TypeError or ValueError for scales that are none of them."""
    blocks = -(-in_features // BLOCK)
    if (
        tuple(x_scale.shape) == (tokens, blocks)
        and tuple(w_scale.shape) == (-(-out_features // BLOCK), blocks)
        and (x_scale.numel() > 1 or w_scale.numel() > 1)
        and (blocks > 1 or out_features > 1)
    ):
        for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
            if scale.dtype != torch.float32:
                raise TypeError(f"{name} has dtype {scale.dtype}: allowed is torch.float32")
        return "block"
    check_per_row("x_scale", x_scale, tokens, torch.float32)
    check_per_row("w_scale", w_scale, out_features, torch.float32)
    return "tensor" if x_scale.numel() == w_scale.numel() == 1 else "channel"


def fp8_linear(
    x_codes: torch.Tensor,
    w_codes: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x_codes times the transpose of w_codes, times both scales, plus bias.

    x_codes: float8_e4m3fn [M, K]; w_codes: float8_e4m3fn or float8_e5m2 [N, K]; columns contiguous, rows at any
        stride.
    x_scale, w_scale: float32, either one value or one a row each ([M, 1] or [M]; [N, 1] or [N]), or blocks: x_scale
        [M, ceil(K / 128)] and w_scale [ceil(N / 128), ceil(K / 128)], any strides.
    bias: [N], float of any kind. out_dtype: float16, bfloat16 or float32.

    Returns [M, N]. Products of 128 columns are added by the matrix instructions, the sums of 128 (times their block
    scales) in float32. On GPUs without float8_e4m3fn (compute capability below 8.9, ROCm), and beside float8_e5m2 on
    all, codes become float16 / 256 by shifts, exactly, except that a NaN code reads as 480: rows that are not finite
    must have a scale that is not, as `quantize` gives them. float8_e5m2 codes are the upper bytes of float16. From
    `w8a8_configs.SCALED_MM_FROM` tokens on torch._scaled_mm multiplies two of float8_e4m3fn.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served.
    """
    check_codes(torch.float8_e4m3fn, torch.float8_e5m2, x_codes=x_codes, w_codes=w_codes)
    check_out(bias, out_dtype, w_codes)
    check_devices(w_codes.device, x_codes=x_codes, x_scale=x_scale, w_scale=w_scale, bias=bias)
    (tokens, in_features), out_features = x_codes.shape, w_codes.shape[0]
    kind = _kind(x_scale, w_scale, tokens, out_features, in_features)
    fewest = SCALED_MM_FROM.get(kind)
    is_e5m2 = w_codes.dtype == torch.float8_e5m2
    native = has_fp8(w_codes.device) and not is_e5m2
    if (
        fewest is not None
        and tokens >= fewest
        and (native or INTERPRETED)
        and not is_e5m2
        and not (in_features % 16 or out_features % 16)
    ):
        return _scaled_mm(x_codes, w_codes, x_scale, w_scale, bias, out_dtype)
    if not native:
        x_codes, w_codes = x_codes.view(torch.uint8), w_codes.view(torch.uint8)
    return launch(
        "fp8" if native else "e5m2_as_fp16" if is_e5m2 else "fp8_as_fp16",
        x_codes,
        w_codes,
        x_scale,
        w_scale,
        bias,
        out_dtype,
        block_scales=kind == "block",
    )


def _scaled_mm(x_codes, w_codes, x_scale, w_scale, bias, out_dtype) -> torch.Tensor:
    if x_scale.numel() == w_scale.numel() == 1:
        x_scale, w_scale = x_scale.reshape(()), w_scale.reshape(())
    else:
        x_scale = x_scale.reshape(-1, 1).expand(len(x_codes), 1).contiguous()
        w_scale = w_scale.reshape(1, -1).expand(1, len(w_codes)).contiguous()
    if bias is not None:
        bias = bias.to(out_dtype)
    return torch._scaled_mm(x_codes, w_codes.t(), x_scale, w_scale, bias=bias, out_dtype=out_dtype)
