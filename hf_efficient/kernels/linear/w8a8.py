"""Matrix products with quantized activations (int8, float8 E4M3, LLM.int8()) and the quantization before them: torch
ops for CUDA and ROCm (the Triton kernels of efficient_linear) and CPU (activation_cpu.py).

Layers that train call `quantized_linear` and `llm_int8_linear`, which quantize x themselves and have gradients with
respect to x and bias: rounding of x counts as the identity (straight through), the weight as dequantized. Inference can
quantize while it normalises or multiplies the gate (`rms_norm_quantize`, `silu_mul_quantize`) and give the codes to
`multiply`, for several products with one input.
"""

from typing import NamedTuple

import torch

from hf_efficient.kernels.linear import w8a8_cpu
from hf_efficient.kernels.linear.w8a8_cpu import pack_int8, unpack_int8  # noqa: F401
from hf_efficient.kernels.linear.weight_only import rows_of


FORMATS = ("int8", "int8_asymmetric", "fp8", "fp8_block")


class Quantized(NamedTuple):
    """codes [M, K] int8 or float8_e4m3fn; scale float32 [M, 1], [M, ceil(K / 128)] ("fp8_block") or one static value;
    zero_point int8 [M, 1] or static, or None."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


def quantize(x, format, scale=None, zero_point=None) -> Quantized:
    """x [M, K] floats to codes; format is one of FORMATS: "int8" (symmetric), "int8_asymmetric", "fp8" (one scale a row)
    or "fp8_block" (one scale for 128 columns of a row). scale float32 (and zero_point int8) of one element: static.

    Raises RuntimeError when x requires grad while grad is enabled, ValueError for other formats."""
    _check(format, x)
    return _assemble(torch.ops.hf_efficient.quantize_activation(x, format, scale, zero_point), scale, zero_point)


def rms_norm_quantize(x, weight, eps, residual=None, *, format, scale=None, zero_point=None, normalised=False):
    """`quantize` of the RMS norm of x [M, K] (+ residual) times weight [K]: (Quantized, x + residual or None, the
    normalised rows in the dtype of x or None)."""
    _check(format, x, weight, residual)
    tensors = torch.ops.hf_efficient.rms_norm_quantize(x, weight, residual, eps, format, scale, zero_point, normalised)
    made = len(tensors) - (residual is not None) - bool(normalised)
    total = tensors[made] if residual is not None else None
    return _assemble(tensors[:made], scale, zero_point), total, tensors[-1] if normalised else None


def silu_mul_quantize(gate, up, *, format, scale=None, zero_point=None) -> Quantized:
    """`quantize` of silu(gate) * up, both [M, K]."""
    _check(format, gate, up)
    return _assemble(torch.ops.hf_efficient.silu_mul_quantize(gate, up, format, scale, zero_point), scale, zero_point)


def multiply(x: Quantized, w_codes, w_scale, bias=None, *, w_zero_point=None, w_sums=None, out_dtype):
    """Quantized rows [M, K] times the transpose of w_codes [N, K] of the same kind, plus bias [N]: [M, N] in out_dtype.

    w_scale float32: one value, [N, 1] or [N]; [ceil(N / 128), ceil(K / 128)] for x in "fp8_block". int8 only:
    w_zero_point int8 like w_scale; w_sums int32 [N], `w_codes.sum(1, dtype=torch.int32)`, saves computing them for x in
    "int8_asymmetric"; on a CPU w_codes may be what `pack_int8` made of them."""
    if x.codes.dtype != w_codes.dtype or w_codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise TypeError(
            f"codes of x are {x.codes.dtype}, of the weight {w_codes.dtype}: allowed are int8 or float8_e4m3fn for both"
        )
    if x.codes.dtype == torch.int8:
        return torch.ops.hf_efficient.w8a8_linear(
            x.codes, w_codes, x.scale, w_scale, bias, x.zero_point, w_zero_point, w_sums, out_dtype
        )
    return torch.ops.hf_efficient.fp8_linear(x.codes, w_codes, x.scale, w_scale, bias, out_dtype)


def quantized_linear(
    x, w_codes, w_scale, bias=None, *, format, scale=None, zero_point=None, w_zero_point=None, w_sums=None
):
    """x [..., K] floats, quantized as `quantize` does, times the transpose of w_codes [N, K], plus bias: [..., N] in the
    dtype of x, differentiable with respect to x and bias. Other arguments as `quantize` and `multiply`."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: allowed is one of {FORMATS}")
    rows = rows_of(x, x.shape[-1])
    y = torch.ops.hf_efficient.quantized_linear(
        rows, w_codes, w_scale, bias, format, scale, zero_point, w_zero_point, w_sums
    )
    return y.view(*x.shape[:-1], y.shape[1])


def llm_int8_linear(x, w_codes, w_scale, bias=None, *, threshold=6.0):
    """LLM.int8() (https://arxiv.org/abs/2208.07339): x [..., K] times the transpose of int8 w_codes [N, K] times w_scale
    [N], plus bias; columns of x that hold a magnitude of `threshold` or more are multiplied unrounded. [..., N] in the
    dtype of x, differentiable with respect to x and bias."""
    rows = rows_of(x, x.shape[-1])
    y = torch.ops.hf_efficient.llm_int8_linear(rows, w_codes, w_scale, bias, threshold)
    return y.view(*x.shape[:-1], y.shape[1])


def _check(format, *inputs) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: allowed is one of {FORMATS}")
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        raise RuntimeError(
            "codes have no gradient: quantize under torch.no_grad(), or train with quantized_linear, which is "
            "differentiable with respect to its input"
        )


def _assemble(tensors, scale, zero_point) -> Quantized:
    """An op returns only what it made: codes, then scale and zero point if they are not static."""
    if scale is not None:
        return Quantized(tensors[0], scale, zero_point)
    return Quantized(*tensors)


_STATIC = "str format, Tensor? scale, Tensor? zero_point"
_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(f"quantize_activation(Tensor x, {_STATIC}) -> Tensor[]")
_library.define(
    f"rms_norm_quantize(Tensor x, Tensor weight, Tensor? residual, float eps, {_STATIC}, bool normalised) -> Tensor[]"
)
_library.define(f"silu_mul_quantize(Tensor gate, Tensor up, {_STATIC}) -> Tensor[]")
_library.define(
    "w8a8_linear(Tensor x_codes, Tensor w_codes, Tensor x_scale, Tensor w_scale, Tensor? bias, Tensor? x_zero_point, "
    "Tensor? w_zero_point, Tensor? w_sums, ScalarType out_dtype) -> Tensor"
)
_library.define(
    "fp8_linear(Tensor x_codes, Tensor w_codes, Tensor x_scale, Tensor w_scale, Tensor? bias, ScalarType out_dtype) "
    "-> Tensor"
)
_library.define(
    f"quantized_linear(Tensor x, Tensor w_codes, Tensor w_scale, Tensor? bias, {_STATIC}, Tensor? w_zero_point, "
    "Tensor? w_sums) -> Tensor"
)
_library.define(
    "dequantize_codes(Tensor w_codes, Tensor w_scale, Tensor? w_zero_point, ScalarType dtype, int in_features) -> Tensor"
)
_library.define("llm_int8_linear(Tensor x, Tensor w_codes, Tensor w_scale, Tensor? bias, float threshold) -> Tensor")


def _made(quantized, scale) -> list[torch.Tensor]:
    """What the op made of a Quantized; the static scale and zero point are the caller's."""
    kept = quantized[:1] if scale is not None else quantized
    return [tensor for tensor in kept if tensor is not None]


def _quantize_activation_cuda(x, format, scale, zero_point):
    from hf_efficient.kernels import efficient_linear

    return _made(efficient_linear.quantize(x, format, scale, zero_point), scale)


def _rms_norm_quantize_cuda(x, weight, residual, eps, format, scale, zero_point, normalised):
    from hf_efficient.kernels import efficient_linear

    quantized, total, rows = efficient_linear.rms_norm_quantize(
        x, weight, eps, residual, format=format, scale=scale, zero_point=zero_point, normalised=normalised
    )
    return _made(quantized, scale) + [tensor for tensor in (total, rows) if tensor is not None]


def _rms_norm_quantize_cpu(x, weight, residual, eps, format, scale, zero_point, normalised):
    total, rows = w8a8_cpu.rms_norm(x, weight, eps, residual)
    tensors = w8a8_cpu.quantize(rows, format, scale, zero_point)
    if residual is not None:
        tensors.append(total)
    return tensors + [rows.to(x.dtype, copy=True)] if normalised else tensors


def _silu_mul_quantize_cuda(gate, up, format, scale, zero_point):
    from hf_efficient.kernels import efficient_linear

    return _made(efficient_linear.silu_mul_quantize(gate, up, format=format, scale=scale, zero_point=zero_point), scale)


def _silu_mul_quantize_cpu(gate, up, format, scale, zero_point):
    rows = torch.nn.functional.silu(gate.float()).mul_(up)
    return w8a8_cpu.quantize(rows, format, scale, zero_point)


def _w8a8_linear_cuda(x_codes, w_codes, x_scale, w_scale, bias, x_zero_point, w_zero_point, w_sums, out_dtype):
    from hf_efficient.kernels import efficient_linear

    return efficient_linear.w8a8_linear(
        x_codes,
        w_codes,
        x_scale,
        w_scale,
        bias,
        x_zero_point=x_zero_point,
        w_zero_point=w_zero_point,
        w_sums=w_sums,
        out_dtype=out_dtype,
    )


def _fp8_linear_cuda(x_codes, w_codes, x_scale, w_scale, bias, out_dtype):
    from hf_efficient.kernels import efficient_linear

    return efficient_linear.fp8_linear(x_codes, w_codes, x_scale, w_scale, bias, out_dtype=out_dtype)


def _quantized_linear_cuda(x, w_codes, w_scale, bias, format, scale, zero_point, w_zero_point, w_sums):
    from hf_efficient.kernels import efficient_linear

    codes, scale, zero_point = efficient_linear.quantize(x, format, scale, zero_point)
    if "fp8" in format:
        return efficient_linear.fp8_linear(codes, w_codes, scale, w_scale, bias, out_dtype=x.dtype)
    return _w8a8_linear_cuda(codes, w_codes, scale, w_scale, bias, zero_point, w_zero_point, w_sums, x.dtype)


def _dequantize_codes(w_codes, w_scale, w_zero_point, dtype, in_features):
    return w8a8_cpu.dequantize(w_codes, w_scale, w_zero_point, dtype)


def _llm_int8_linear_cuda(x, w_codes, w_scale, bias, threshold):
    from hf_efficient.kernels import efficient_linear

    return efficient_linear.llm_int8_linear(x, w_codes, w_scale, bias, threshold=threshold)


for _name, _cuda, _cpu in (
    ("quantize_activation", _quantize_activation_cuda, w8a8_cpu.quantize),
    ("rms_norm_quantize", _rms_norm_quantize_cuda, _rms_norm_quantize_cpu),
    ("silu_mul_quantize", _silu_mul_quantize_cuda, _silu_mul_quantize_cpu),
    ("w8a8_linear", _w8a8_linear_cuda, w8a8_cpu.int8_product),
    ("fp8_linear", _fp8_linear_cuda, w8a8_cpu.fp8_product),
    ("quantized_linear", _quantized_linear_cuda, w8a8_cpu.linear),
    ("dequantize_codes", _dequantize_codes, _dequantize_codes),
    ("llm_int8_linear", _llm_int8_linear_cuda, w8a8_cpu.llm_int8_product),
):
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _cpu, "CPU")
for _name, _cpu in (
    ("w8a8_linear", w8a8_cpu.int8_product),
    ("quantized_linear", w8a8_cpu.linear),
    ("dequantize_codes", _dequantize_codes),
):
    _library.impl(_name, _cpu, "MkldnnCPU")  # weights from pack_int8


@torch.library.register_fake("hf_efficient::quantize_activation", lib=_library)
def _fake_quantize(x, format, scale, zero_point):
    fp8 = format in ("fp8", "fp8_block")
    tensors = [x.new_empty(x.shape, dtype=torch.float8_e4m3fn if fp8 else torch.int8)]
    if scale is None:
        groups = (x.shape[1] + 127) // 128 if format == "fp8_block" else 1
        tensors.append(x.new_empty(x.shape[0], groups, dtype=torch.float32))
        if format == "int8_asymmetric":
            tensors.append(x.new_empty(x.shape[0], 1, dtype=torch.int8))
    return tensors


@torch.library.register_fake("hf_efficient::rms_norm_quantize", lib=_library)
def _fake_rms_norm_quantize(x, weight, residual, eps, format, scale, zero_point, normalised):
    wide = [x.new_empty(x.shape) for made in (residual is not None, normalised) if made]
    return _fake_quantize(x, format, scale, zero_point) + wide


@torch.library.register_fake("hf_efficient::silu_mul_quantize", lib=_library)
def _fake_silu_mul_quantize(gate, up, format, scale, zero_point):
    return _fake_quantize(gate, format, scale, zero_point)


def _out_features(w_codes, in_features) -> int:
    """Of codes [N, K], or [K, N] from pack_int8: a fake tensor does not tell which."""
    return w_codes.shape[0] if w_codes.shape[1] == in_features else w_codes.shape[1]


@torch.library.register_fake("hf_efficient::w8a8_linear", lib=_library)
def _fake_w8a8_linear(x_codes, w_codes, x_scale, w_scale, bias, x_zero_point, w_zero_point, w_sums, out_dtype):
    return x_codes.new_empty(x_codes.shape[0], _out_features(w_codes, x_codes.shape[1]), dtype=out_dtype)


@torch.library.register_fake("hf_efficient::fp8_linear", lib=_library)
def _fake_fp8_linear(x_codes, w_codes, x_scale, w_scale, bias, out_dtype):
    return x_codes.new_empty(x_codes.shape[0], w_codes.shape[0], dtype=out_dtype)


@torch.library.register_fake("hf_efficient::quantized_linear", lib=_library)
def _fake_quantized_linear(x, w_codes, w_scale, bias, format, scale, zero_point, w_zero_point, w_sums):
    return x.new_empty(x.shape[0], _out_features(w_codes, x.shape[1]))


@torch.library.register_fake("hf_efficient::dequantize_codes", lib=_library)
def _fake_dequantize_codes(w_codes, w_scale, w_zero_point, dtype, in_features):
    return w_scale.new_empty(_out_features(w_codes, in_features), in_features, dtype=dtype)


@torch.library.register_fake("hf_efficient::llm_int8_linear", lib=_library)
def _fake_llm_int8_linear(x, w_codes, w_scale, bias, threshold):
    return x.new_empty(x.shape[0], w_codes.shape[0])


def _save_weight(ctx, inputs, output):
    """For quantized_linear and llm_int8_linear, whose arguments begin alike: x, w_codes, w_scale, bias."""
    x, w_codes, w_scale, bias, *others = inputs
    ctx.in_features = x.shape[1]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.others = len(others)
    w_zero_point = others[3] if len(others) == 5 else None
    ctx.save_for_backward(w_codes, w_scale, w_zero_point)


def _backward(ctx, grad):
    w_codes, w_scale, w_zero_point = ctx.saved_tensors
    if ctx.needs_input_grad[2]:
        raise RuntimeError("w_scale requires grad: gradients are of x and bias, the weight is frozen")
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ torch.ops.hf_efficient.dequantize_codes(
            w_codes, w_scale, w_zero_point, grad.dtype, ctx.in_features
        )
    if ctx.needs_input_grad[3]:
        grad_bias = grad.sum(0).to(ctx.bias_dtype)
    return grad_x, None, None, grad_bias, *[None] * ctx.others


for _name in ("quantized_linear", "llm_int8_linear"):
    torch.library.register_autograd(f"hf_efficient::{_name}", _backward, setup_context=_save_weight, lib=_library)
