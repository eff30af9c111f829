"""What the kernels with 8-bit activations must compute, in plain torch on any device; scales are float32 throughout."""

import torch


GROUP = 128  # columns (and weight rows) with one scale in 1x128 and 128x128 blocks
TINY = 2.0**-100
E4M3_MAX = 448.0


def quantize_reference(x, format, scale=None, zero_point=None):
    """`quantize` of x [M, K]: (codes [M, K], scale, zero_point or None)."""
    x = x.float()
    if format == "fp8_block":
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        codes, scale, _ = quantize_reference(padded.flatten(0, 1), "fp8")
        groups = -(-x.shape[1] // GROUP)
        return codes.view(len(x), groups * GROUP)[:, : x.shape[1]], scale.view(len(x), groups), None
    if scale is None:
        largest = x.abs().amax(1, keepdim=True)
        if format == "int8_asymmetric":
            low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
            scale = ((high - low) * (1 / 255)).clamp(min=TINY)
            zero_point = ((-low * (1 / scale)).clamp(0, 255).round() - 128).to(torch.int8)
        else:
            scale = (largest * (1 / (127 if format == "int8" else E4M3_MAX))).clamp(min=TINY)
    scaled = x * (1 / scale.float())
    if format == "fp8":
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale, None
    if format == "int8":
        return scaled.clamp(-128, 127).round().to(torch.int8), scale, None
    codes = scaled.clamp(-512, 512).round() + zero_point.float()
    return codes.clamp(-128, 127).to(torch.int8), scale, zero_point


def rms_norm_reference(x, weight, eps, residual=None):
    """(x + residual in the dtype of x, its RMS norm times weight in float32)."""
    x = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    hidden = x.float()
    return x, hidden * (hidden.square().mean(1, keepdim=True) + eps).sqrt().reciprocal() * weight.float()


def silu_mul_reference(gate, up):
    """silu(gate) * up in float32."""
    return torch.nn.functional.silu(gate.float()) * up.float()


def expand_scale(scale, rows, columns):
    """A scale that is one value, [rows], [rows, 1], [rows, ceil(columns / 128)] (1x128 blocks) or [ceil(rows / 128),
    ceil(columns / 128)] -> float32 that broadcasts against [rows, columns]."""
    scale = scale.float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
    if scale.shape[1] != 1:
        scale = scale.repeat_interleave(GROUP, 1)[:, :columns]
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(GROUP, 0)[:rows]
    return scale


def dequantize_codes(codes, scale, zero_point=None, dtype=torch.float32):
    """(codes [rows, columns] - zero point) * scale, computed in float32 and rounded once to `dtype`."""
    numbers = codes.float()
    if zero_point is not None:
        numbers = numbers - zero_point.float().reshape(-1, 1)
    return (numbers * expand_scale(scale, *codes.shape)).to(dtype)


def int8_accumulate_reference(x_codes, w_codes, x_zero_point=None, w_zero_point=None):
    """sum over k of (x - x_zero_point) * (w - w_zero_point), exactly: int64 [M, N]."""
    x = x_codes.long() - (0 if x_zero_point is None else x_zero_point.long())
    w = w_codes.long() - (0 if w_zero_point is None else w_zero_point.long())
    if x.is_cuda:  # which has no int64 products; float64 is exact below 2^53
        return (x.double() @ w.double().t()).long()
    return x @ w.t()


def w8a8_linear_reference(x_codes, w_codes, x_scale, w_scale, bias=None, *, x_zero_point=None, w_zero_point=None):
    """int8 codes: the exact integer sum times both scales, plus bias, in float64 [M, N]."""
    sums = int8_accumulate_reference(x_codes, w_codes, x_zero_point, w_zero_point).double()
    y = sums * x_scale.double().reshape(-1, 1) * w_scale.double().reshape(1, -1)
    return y if bias is None else y + bias.double()


def fp8_linear_reference(x_codes, w_codes, x_scale, w_scale, bias=None):
    """float8_e4m3fn codes, scales of any of the three kinds: float64 [M, N]."""
    x = x_codes.double() * expand_scale(x_scale, *x_codes.shape).double()
    w = w_codes.double() * expand_scale(w_scale, *w_codes.shape).double()
    y = x @ w.t()
    return y if bias is None else y + bias.double()


def llm_int8_reference(x, w_codes, w_scale, bias=None, threshold=6.0):
    """LLM.int8(): columns of x with a magnitude of `threshold` or more are multiplied as they are, the others as int8
    codes with one scale a row: float64 [M, N]."""
    outliers = (x.float().abs() >= threshold).any(0)
    codes, scale, _ = quantize_reference(x.float().masked_fill(outliers, 0.0), "int8")
    y = w8a8_linear_reference(codes, w_codes, scale, w_scale, bias)
    return y + x.double()[:, outliers] @ (w_codes.double() * w_scale.double().reshape(-1, 1))[:, outliers].t()
