"""LLM.int8() (https://arxiv.org/abs/2208.07339): int8 products, except for the outlier columns of the activations."""

import torch
import triton

from .activation_quant import WIDEST, check_rows
from .activation_reference import dequantize_codes
from .frozen_weight import FrozenWeightProduct, needs_gradient
from .llm_int8_kernels import outlier_columns_kernel, quantize_inliers_kernel
from .w8a8 import check_codes, check_devices, check_out, check_per_row, launch
from .weight_only import _on


def llm_int8_linear(
    x: torch.Tensor,
    w_codes: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    threshold: float = 6.0,
) -> torch.Tensor:
    """x times the transpose of w_codes * w_scale, plus bias. Columns of x in which any magnitude reaches `threshold`
    are multiplied in the dtype of x, the others as int8 codes with one dynamic scale a row of x; both sums meet in the
    epilogue of one kernel.

    x: [M, K] float16, bfloat16 or float32, columns contiguous, K up to 65536. w_codes: int8 [N, K], columns contiguous.
    w_scale: float32, one value or [N, 1] or [N]. bias: [N], float of any kind.

    Which columns are outliers is not known when the weight is stored, so all of it is int8, and the codes of outlier
    columns (exact in 16 bits) are multiplied with x as they are, then by w_scale, as bitsandbytes does; the paper keeps
    these columns in 16 bits. The columns are found, listed and counted on the device: no synchronisation, no limit on
    their number, and a CUDA graph may be replayed with other outliers.

    Returns [M, N] in the dtype of x. x and bias may require grad (straight through the rounding of x, by torch);
    w_scale may not. Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served,
    RuntimeError when w_scale requires grad while grad is enabled.
    """
    check_rows("x", x)
    check_codes(torch.int8, w_codes=w_codes)
    if not 1 <= x.shape[1] <= WIDEST or x.shape[1] != w_codes.shape[1]:
        raise ValueError(
            f"x has {x.shape[1]} columns: allowed are those of w_codes, {w_codes.shape[1]}, up to {WIDEST}"
        )
    check_out(bias, x.dtype, w_codes)
    check_per_row("w_scale", w_scale, len(w_codes), torch.float32)
    check_devices(w_codes.device, x=x, w_scale=w_scale, bias=bias)
    if not threshold > 0:
        raise ValueError(f"threshold={threshold}: allowed is more than 0")
    if needs_gradient(x, bias, w_scale=w_scale):
        return FrozenWeightProduct.apply(x, bias, _multiply, _weight, (w_codes, w_scale), dict(threshold=threshold))
    return _multiply(x, bias, w_codes, w_scale, threshold)


def _weight(w_codes, w_scale, dtype, threshold):
    return dequantize_codes(w_codes, w_scale.reshape(-1, 1), dtype=dtype)


def _multiply(x, bias, w_codes, w_scale, threshold) -> torch.Tensor:
    tokens, in_features = x.shape
    flags = torch.zeros(in_features, dtype=torch.int32, device=x.device)
    columns, count = torch.empty_like(flags), torch.empty(1, dtype=torch.int32, device=x.device)
    codes = torch.empty(tokens, in_features, dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    if tokens:
        block = max(triton.next_power_of_2(in_features), 128)
        scan = min(block, 1024)
        block_m = min(triton.next_power_of_2(tokens), 64)
        with _on(x.device):
            outlier_columns_kernel[(triton.cdiv(tokens, block_m), triton.cdiv(in_features, 128))](
                x, flags, tokens, in_features, x.stride(0), threshold, BLOCK_M=block_m, BLOCK_K=128, num_warps=4
            )
            quantize_inliers_kernel[(tokens + triton.cdiv(in_features, scan),)](
                x, flags, codes, scale, columns, count, tokens, in_features, x.stride(0), BLOCK=block,
                SCAN=scan, num_warps=min(max(block // 512, 1), 16),
            )  # fmt: skip
    outliers = dict(outlier_x=x, outlier_columns=columns, outlier_count=count)
    return launch("int8", codes, w_codes, scale, w_scale, bias, x.dtype, **outliers)
