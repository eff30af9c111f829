"""Matrix products with quantized activations (int8, float8, LLM.int8()), and the quantization before them.

The ops run the Triton kernels of efficient_linear on CUDA and ROCm, `w8a8_cpu` on a CPU. `quantized_linear` and
`llm_int8_linear` quantize x themselves. They have gradients of x and bias: rounding x counts as the identity (straight
through), the weight as dequantized. For several products with one input, quantize once, also while normalising or
multiplying the gate (`rms_norm_quantize`, `silu_mul_quantize`), and give the codes to `multiply`.
"""

from typing import NamedTuple

import torch

from hf_efficient.kernels.linear import op, w8a8_cpu
from hf_efficient.kernels.linear.layout import rows_of
from hf_efficient.kernels.linear.w8a8_cpu import pack_int8, unpack_int8  # noqa: F401


FORMATS = ("int8", "int8_asymmetric", "fp8", "fp8_block")


class Quantized(NamedTuple):
    """Rows in 8 bits: codes [M, K] int8 or float8_e4m3fn; scale float32 [M, 1], [M, ceil(K / 128)] ("fp8_block") or one
    static value; zero_point int8 [M, 1] or static, or None."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


def quantize(x, format, scale=None, zero_point=None) -> Quantized:
    """Rounds x [M, K] to codes in one of FORMATS, which `efficient_linear.quantize` documents. scale, zero_point:
    static ones, float32 and int8 of one element.

    Raises RuntimeError where x requires grad while grad is enabled, ValueError for another format.
    """
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
    """Quantized rows [M, K] @ w_codes [N, K]^T + bias [N]: [M, N] in out_dtype. TypeError for codes of different or
    other dtypes.

    w_codes: of the dtype of the codes of x, or float8_e5m2 for float8_e4m3fn; on a CPU int8 codes may be what
        `pack_int8` made of them.
    w_scale: float32, one value, [N, 1] or [N]; [ceil(N / 128), ceil(K / 128)] for x in "fp8_block".
    w_zero_point: for int8, int8 like w_scale.
    w_sums: for x in "int8_asymmetric", `w_codes.sum(1, dtype=torch.int32)`; None computes it in each call.
    """
    w8a8_cpu.check_codes(x.codes, w_codes)
    if x.codes.dtype == torch.int8:
        return torch.ops.hf_efficient.w8a8_linear(
            x.codes, w_codes, x.scale, w_scale, bias, x.zero_point, w_zero_point, w_sums, out_dtype
        )
    return torch.ops.hf_efficient.fp8_linear(x.codes, w_codes, x.scale, w_scale, bias, out_dtype)


def quantized_linear(
    x, w_codes, w_scale, bias=None, *, format, scale=None, zero_point=None, w_zero_point=None, w_sums=None
):
    """x [..., K], rounded as by `quantize`, @ w_codes [N, K]^T + bias: [..., N] in the dtype of x, differentiable in x
    and bias. Other arguments as for `quantize` and `multiply`."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: allowed is one of {FORMATS}")
    rows = rows_of(x, x.shape[-1])
    y = torch.ops.hf_efficient.quantized_linear(
        rows, w_codes, w_scale, bias, format, scale, zero_point, w_zero_point, w_sums
    )
    return y.view(*x.shape[:-1], y.shape[1])


def llm_int8_linear(x, w_codes, w_scale, bias=None, *, threshold=6.0):
    """LLM.int8() (https://arxiv.org/abs/2208.07339): x [..., K] @ (w_codes [N, K] * w_scale [N])^T + bias, [..., N] in
    the dtype of x.

    Columns of x that hold a magnitude of `threshold` or more are multiplied unrounded. Differentiable in x and bias.
    """
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
    """The result of an op, which returns codes, and scale and zero point where they are not static."""
    if scale is not None:
        return Quantized(tensors[0], scale, zero_point)
    return Quantized(*tensors)


def _made(quantized, scale) -> list[torch.Tensor]:
    """The new tensors of a Quantized: an op may not return its arguments, the static scale and zero point."""
    kept = quantized[:1] if scale is not None else quantized
    return [tensor for tensor in kept if tensor is not None]


def _quantize_activation_cuda(x, format, scale, zero_point):
    return _made(op.triton_kernels().quantize(x, format, scale, zero_point), scale)


def _quantize_activation_fake(x, format, scale, zero_point):
    fp8 = format in ("fp8", "fp8_block")
    tensors = [x.new_empty(x.shape, dtype=torch.float8_e4m3fn if fp8 else torch.int8)]
    if scale is None:
        groups = (x.shape[1] + 127) // 128 if format == "fp8_block" else 1
        tensors.append(x.new_empty(x.shape[0], groups, dtype=torch.float32))
        if format == "int8_asymmetric":
            tensors.append(x.new_empty(x.shape[0], 1, dtype=torch.int8))
    return tensors


def _rms_norm_quantize_cuda(x, weight, residual, eps, format, scale, zero_point, normalised):
    quantized, total, rows = op.triton_kernels().rms_norm_quantize(
        x, weight, eps, residual, format=format, scale=scale, zero_point=zero_point, normalised=normalised
    )
    return _made(quantized, scale) + [tensor for tensor in (total, rows) if tensor is not None]


def _rms_norm_quantize_cpu(x, weight, residual, eps, format, scale, zero_point, normalised):
    total, rows = w8a8_cpu.rms_norm(x, weight, eps, residual)
    tensors = w8a8_cpu.quantize(rows, format, scale, zero_point)
    if residual is not None:
        tensors.append(total)
    return tensors + [rows.to(x.dtype, copy=True)] if normalised else tensors


def _rms_norm_quantize_fake(x, weight, residual, eps, format, scale, zero_point, normalised):
    wide = [x.new_empty(x.shape) for made in (residual is not None, normalised) if made]
    return _quantize_activation_fake(x, format, scale, zero_point) + wide


def _silu_mul_quantize_cuda(gate, up, format, scale, zero_point):
    how = dict(format=format, scale=scale, zero_point=zero_point)
    return _made(op.triton_kernels().silu_mul_quantize(gate, up, **how), scale)


def _silu_mul_quantize_cpu(gate, up, format, scale, zero_point):
    rows = torch.nn.functional.silu(gate.float()).mul_(up)
    return w8a8_cpu.quantize(rows, format, scale, zero_point)


def _quantized_linear_cuda(x, w_codes, w_scale, bias, format, scale, zero_point, w_zero_point, w_sums):
    kernels = op.triton_kernels()
    if len(x) == 1 and format == "int8" and scale is None and w_zero_point is None:
        return kernels.rounded_w8a8_linear(x, w_codes, w_scale, bias)
    codes, scale, zero_point = kernels.quantize(x, format, scale, zero_point)
    if "fp8" in format:
        return kernels.fp8_linear(codes, w_codes, scale, w_scale, bias, out_dtype=x.dtype)
    zero_points = dict(x_zero_point=zero_point, w_zero_point=w_zero_point, w_sums=w_sums)
    return kernels.w8a8_linear(codes, w_codes, scale, w_scale, bias, **zero_points, out_dtype=x.dtype)


def _silu_mul_quantized_linear_cuda(gate, up, w_codes, w_scale, bias):
    kernels = op.triton_kernels()
    if len(gate) == 1:
        return kernels.rounded_w8a8_linear(gate, w_codes, w_scale, bias, up)
    codes, scale, _ = kernels.silu_mul_quantize(gate, up, format="int8")
    return kernels.w8a8_linear(codes, w_codes, scale, w_scale, bias, out_dtype=gate.dtype)


def _silu_mul_quantized_linear_cpu(gate, up, w_codes, w_scale, bias):
    codes, scale = _silu_mul_quantize_cpu(gate, up, "int8", None, None)
    return w8a8_cpu.int8_product(codes, w_codes, scale, w_scale, bias, None, None, None, gate.dtype)


def _out_features(w_codes, in_features) -> int:
    """N of codes [N, K], or [K, N] from `pack_int8`, which a fake tensor does not tell apart."""
    return w_codes.shape[0] if w_codes.shape[1] == in_features else w_codes.shape[1]


def _product_fake(x, w_codes, *others):
    """In the dtype of x, or in the op's last argument where that is a dtype."""
    dtype = others[-1] if isinstance(others[-1], torch.dtype) else x.dtype
    return x.new_empty(x.shape[0], _out_features(w_codes, x.shape[1]), dtype=dtype)


def _dequantize_codes(w_codes, w_scale, w_zero_point, dtype, in_features):
    return w8a8_cpu.dequantize(w_codes, w_scale, w_zero_point, dtype)


def _weight(dtype, in_features, w_codes, w_scale, w_zero_point=None, **_):
    return torch.ops.hf_efficient.dequantize_codes(w_codes, w_scale, w_zero_point, dtype, in_features)


_HOW = "str format, Tensor? scale, Tensor? zero_point"
op.define(
    f"quantize_activation(Tensor x, {_HOW}) -> Tensor[]",
    cpu=w8a8_cpu.quantize,
    cuda=_quantize_activation_cuda,
    fake=_quantize_activation_fake,
)
op.define(
    f"rms_norm_quantize(Tensor x, Tensor weight, Tensor? residual, float eps, {_HOW}, bool normalised) -> Tensor[]",
    cpu=_rms_norm_quantize_cpu,
    cuda=_rms_norm_quantize_cuda,
    fake=_rms_norm_quantize_fake,
)
op.define(
    f"silu_mul_quantize(Tensor gate, Tensor up, {_HOW}) -> Tensor[]",
    cpu=_silu_mul_quantize_cpu,
    cuda=_silu_mul_quantize_cuda,
    fake=lambda gate, up, *how: _quantize_activation_fake(gate, *how),
)
op.define(
    "w8a8_linear(Tensor x_codes, Tensor w_codes, Tensor x_scale, Tensor w_scale, Tensor? bias, Tensor? x_zero_point, "
    "Tensor? w_zero_point, Tensor? w_sums, ScalarType out_dtype) -> Tensor",
    cpu=w8a8_cpu.int8_product,
    cuda="w8a8_linear",
    fake=_product_fake,
    takes_mkldnn=True,
)
op.define(
    "fp8_linear(Tensor x_codes, Tensor w_codes, Tensor x_scale, Tensor w_scale, Tensor? bias, ScalarType out_dtype) "
    "-> Tensor",
    cpu=w8a8_cpu.fp8_product,
    cuda="fp8_linear",
    fake=_product_fake,
)
op.define(
    "dequantize_codes(Tensor w_codes, Tensor w_scale, Tensor? w_zero_point, ScalarType dtype, int in_features) "
    "-> Tensor",
    cpu=_dequantize_codes,
    cuda=_dequantize_codes,
    fake=lambda w_codes, w_scale, zero_point, dtype, in_features: w_scale.new_empty(
        _out_features(w_codes, in_features), in_features, dtype=dtype
    ),
    takes_mkldnn=True,
)
op.define(
    f"quantized_linear(Tensor x, Tensor w_codes, Tensor w_scale, Tensor? bias, {_HOW}, Tensor? w_zero_point, "
    "Tensor? w_sums) -> Tensor",
    cpu=w8a8_cpu.linear,
    cuda=_quantized_linear_cuda,
    fake=_product_fake,
    takes_mkldnn=True,
    weight=_weight,
)
op.define(
    "silu_mul_quantized_linear(Tensor gate, Tensor up, Tensor w_codes, Tensor w_scale, Tensor? bias) -> Tensor",
    cpu=_silu_mul_quantized_linear_cpu,
    cuda=_silu_mul_quantized_linear_cuda,
    fake=lambda gate, up, w_codes, *others: _product_fake(gate, w_codes, *others),
    takes_mkldnn=True,
)
op.define(
    "llm_int8_linear(Tensor x, Tensor w_codes, Tensor w_scale, Tensor? bias, float threshold) -> Tensor",
    cpu=w8a8_cpu.llm_int8_product,
    cuda="llm_int8_linear",
    fake=_product_fake,
    weight=_weight,
)
