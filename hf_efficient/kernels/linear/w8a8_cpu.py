"""The ops of `w8a8` by torch's operators. `quantize` gives the codes of the Triton kernels bit for bit; norm and SiLU
agree to float32 accuracy."""

import torch
import torch.nn.functional as F


GROUP = 128  # columns that share a scale in "fp8_block"
TINY = 2.0**-100  # the smallest scale
E4M3_MAX = 448.0
PAIRS = (  # of dtypes that are multiplied: codes of x, of the weight
    (torch.int8, torch.int8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2),
)


def quantize(x, format, scale, zero_point) -> list[torch.Tensor]:
    """[codes, and the scale and zero point where they are not given]. Passes over x dominate the time, so they are
    few."""
    if format == "fp8_block":
        padded = F.pad(x, (0, -x.shape[1] % GROUP)).view(-1, GROUP)
        codes, scale = quantize(padded, "fp8", None, None)
        groups = -(-x.shape[1] // GROUP)
        return [codes.view(len(x), groups * GROUP)[:, : x.shape[1]].contiguous(), scale.view(len(x), groups)]
    new = []
    if scale is None:
        if format == "int8_asymmetric":  # aminmax takes ten times as long as amin and amax (torch 2.13)
            low, high = x.amin(1, keepdim=True).float().clamp_(max=0), x.amax(1, keepdim=True).float().clamp_(min=0)
            scale = ((high - low) * (1 / 255)).clamp_(min=TINY)
            zero_point = ((-low * (1 / scale)).clamp_(0, 255).round_() - 128).to(torch.int8)
        else:
            largest = 127 if format == "int8" else E4M3_MAX
            scale = (x.abs().amax(1, keepdim=True).float() * (1 / largest)).clamp_(min=TINY)
        new = [scale] if zero_point is None else [scale, zero_point]
    scaled = x.to(torch.float32, copy=True).mul_(1 / scale.reshape(-1, 1))
    if format == "fp8":
        return [scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), *new]
    if format == "int8_asymmetric":
        scaled = scaled.clamp_(-512, 512).round_().add_(zero_point)
    return [scaled.clamp_(-128, 127).round_().to(torch.int8), *new]


def check_codes(x_codes: torch.Tensor, w_codes: torch.Tensor) -> None:
    """Raises TypeError for codes that are not multiplied."""
    if (x_codes.dtype, w_codes.dtype) not in PAIRS:
        raise TypeError(
            f"codes of x are {x_codes.dtype}, of the weight {w_codes.dtype}: allowed are int8 or float8_e4m3fn for "
            "both, and float8_e4m3fn with float8_e5m2"
        )


def check_columns(in_features: int, x_has_zero: bool, w_has_zero: bool) -> None:
    """Raises ValueError for so many columns that sums of products of int8 codes, less zero points, may exceed int32."""
    largest = (255 if x_has_zero else 128) * (255 if w_has_zero else 128)
    if in_features * largest >= 2**31:
        raise ValueError(f"K = {in_features}: allowed is at most {(2**31 - 1) // largest}, or the sum overflows int32")


def rms_norm(x, weight, eps, residual) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + residual in the dtype of x, its RMS norm times weight in float32)."""
    x = x if residual is None else x + residual
    return x, F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def pack_int8(w_codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] -> the same codes in oneDNN's opaque order, [K, N], which saves `int8_product` reordering them in
    each call. On a CPU without VNNI instructions, where sums of uint8 x int8 products may saturate: w_codes itself."""
    return torch.ops.onednn.qlinear_prepack(w_codes, None) if torch.cpu._is_vnni_supported() else w_codes


def unpack_int8(w_codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_int8`; plain codes stay as they are."""
    return w_codes.to_dense().t() if w_codes.is_mkldnn else w_codes


def _packed_product(x_codes, packed, w_scale) -> torch.Tensor:
    """Products of codes, summed in int32, times w_scale [1, N]: float32 [M, N]. oneDNN is fast for unsigned x only."""
    unsigned = x_codes.bitwise_xor(-128).view(torch.uint8)
    scale = w_scale.flatten().expand(packed.shape[1]).contiguous()
    no_zero_points = torch.zeros(packed.shape[1], dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise(
        unsigned, 1.0, 128, packed, scale, no_zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )


def sums_of_products(x_codes: torch.Tensor, w_codes: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] and [N, K] -> int32 [M, N]. Of one column torch's operator takes only a row that is no transposed
    view: for one with strides of 1 it returns memory that nothing was written to (torch 2.13)."""
    return torch._int_mm(x_codes, w_codes.reshape(1, -1) if w_codes.shape[1] == 1 else w_codes.t())


def int8_product(x_codes, w_codes, x_scale, w_scale, bias, x_zero_point, w_zero_point, w_sums, out_dtype):
    """`efficient_linear.w8a8_linear` on a CPU. w_sums: int32 [N], sums of the rows of w_codes, or None."""
    check_columns(x_codes.shape[1], x_zero_point is not None, w_zero_point is not None)
    w_scale, correction = w_scale.reshape(1, -1), None
    if x_zero_point is not None:
        w_sums = unpack_int8(w_codes).sum(1, dtype=torch.int32) if w_sums is None else w_sums
        correction = x_zero_point.reshape(-1, 1).int() * w_sums
    if w_zero_point is not None:
        x_sums = x_codes.sum(1, dtype=torch.int32)[:, None]
        if x_zero_point is not None:
            x_sums = x_sums - x_codes.shape[1] * x_zero_point.reshape(-1, 1).int()
        rest = x_sums * w_zero_point.reshape(1, -1).int()
        correction = rest if correction is None else correction + rest
    if w_codes.is_mkldnn:
        y = _packed_product(x_codes, w_codes, w_scale)
        if correction is not None:
            y -= correction * w_scale
    else:
        sums = sums_of_products(x_codes, w_codes)
        y = (sums if correction is None else sums - correction) * w_scale
    y *= x_scale.reshape(-1, 1)
    return (y if bias is None else y.add_(bias)).to(out_dtype)


def linear(x, w_codes, w_scale, bias, format, scale, zero_point, w_zero_point, w_sums):
    """Quantizes x and multiplies the codes; in the dtype of x."""
    codes, *new = quantize(x, format, scale, zero_point)
    scale, zero_point = (scale, zero_point) if scale is not None else (*new, None)[:2]
    check_codes(codes, w_codes)
    if codes.dtype == torch.int8:
        return int8_product(codes, w_codes, scale, w_scale, bias, zero_point, w_zero_point, w_sums, x.dtype)
    return fp8_product(codes, w_codes, scale, w_scale, bias, x.dtype)


def fp8_product(x_codes, w_codes, x_scale, w_scale, bias, out_dtype):
    """One ordinary product of the dequantized operands, in bfloat16 for that output and float32 for others."""
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    x, w = dequantize(x_codes, x_scale, None, dtype), dequantize(w_codes, w_scale, None, dtype)
    return F.linear(x, w, None if bias is None else bias.to(dtype)).to(out_dtype)


def llm_int8_product(x, w_codes, w_scale, bias, threshold):
    """`efficient_linear.llm_int8_linear` on a CPU: columns of x with a magnitude of `threshold` or more stay floats."""
    outliers = (x.abs() >= threshold).any(0)
    codes, scale = quantize(x.float().masked_fill(outliers, 0.0), "int8", None, None)
    y = int8_product(codes, w_codes, scale, w_scale, bias, None, None, None, torch.float32)
    columns = outliers.nonzero()[:, 0]
    if len(columns):
        product = F.linear(x[:, columns].float(), w_codes[:, columns].float())
        y.add_(product.mul_(w_scale.reshape(1, -1)))
    return y.to(x.dtype)


def dequantize(codes, scale, zero_point, dtype) -> torch.Tensor:
    """(codes [rows, columns] - zero_point) * scale, rounded once to `dtype`, on any device. scale and zero_point: one
    value, [rows] or [rows, 1]; scale also of blocks of 1 x 128 or 128 x 128."""
    codes = unpack_int8(codes)
    rows, columns = codes.shape
    numbers = codes.float()
    if zero_point is not None:
        numbers -= zero_point.reshape(-1, 1)
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(GROUP, 1)[:, :columns]
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(GROUP, 0)[:rows]
    return (numbers * scale).to(dtype)
