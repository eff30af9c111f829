"""What the kernels must compute, in plain float32 torch on any device."""

import torch
import torch.nn.functional as F

from .packing import check_layout, check_packed, unpack_codes


def _by_column(values: torch.Tensor, group_size: int | None, in_features: int) -> torch.Tensor:
    """Values of groups [., G] -> float32 [., in_features]."""
    groups = torch.arange(in_features, device=values.device)
    return values.float()[:, groups // group_size if group_size not in (None, -1) else groups * 0]


def dequantize_reference(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    bits: int,
    group_size: int | None,
    in_features: int,
) -> torch.Tensor:
    """The weight float32 [N, K]: (code - zero point) * scale of its group; arguments as in `weight_only_linear`."""
    check_layout(bits, group_size)
    check_packed(packed, in_features, bits)
    codes = unpack_codes(packed, in_features, bits).float()
    centre = 2.0 ** (bits - 1) if zero_point is None else _by_column(zero_point, group_size, in_features)
    return (codes - centre) * _by_column(scale, group_size, in_features)


def weight_only_linear_reference(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, bits: int, group_size: int | None, in_features: int,
) -> torch.Tensor:  # fmt: skip
    """x [M, K] times the transposed weight, plus bias: [M, N] in float32, whatever the dtypes given."""
    weight = dequantize_reference(packed, scale, zero_point, bits=bits, group_size=group_size, in_features=in_features)
    return F.linear(x.float(), weight, None if bias is None else bias.float())


def add_rms_norm_reference(x, weight, eps, residual=None):
    """(x + residual or None, its RMS norm times weight), [M, K] in the dtype of x: the norm in float32, sum, norm and
    result each rounded once."""
    total = None if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = (x if total is None else total).float()
    norm = (wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)).to(x.dtype)
    return total, (norm.float() * weight.float()).to(x.dtype)


def _groups_by_column(weight, scale, zero, group_size):
    """(scale, 1 / scale or 0 where that is not finite, zero point), float32 [N, K]."""
    rows, columns = weight.shape
    shape = rows, -(-columns // group_size)
    zero = zero if isinstance(zero, torch.Tensor) else weight.new_tensor([[zero]])
    scale, zero = (_by_column(given.expand(shape), group_size, columns) for given in (scale, zero))
    inverse = 1 / scale
    return scale, torch.where(inverse.isfinite(), inverse, 0), zero


def fake_quantize_weight_reference(
    weight, scale, zero, *, low: int, high: int, group_size: int, dtype: torch.dtype, work: torch.dtype = torch.float32
) -> torch.Tensor:
    """As `fake_quantize_weight`, [N, K] in `dtype`."""
    scale, inverse, zero = _groups_by_column(weight, scale, zero, group_size)
    codes = (weight * inverse + zero).round().clamp(low, high)
    return ((codes.to(work) - zero.to(work)) * scale.to(work)).to(dtype)


def fake_quantize_gradients_reference(
    weight, scale, zero, rounded, gradient, *, low: int, high: int, group_size: int, passes_all: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fake_quantize_gradients`: float32 [N, K] and [N, ceil(K / group_size)]."""
    _, inverse, zero = _groups_by_column(weight, scale, zero, group_size)
    position, gradient = weight * inverse + zero, gradient.float()
    inside = torch.where((position <= low - 0.5) | (position >= high + 0.5), 0, gradient)
    terms = F.pad(rounded.float() * gradient - inside * weight, (0, -weight.shape[1] % group_size))
    return gradient if passes_all else inside, terms.unflatten(1, (-1, group_size)).sum(2)


def dequantize_codebook_reference(
    packed: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    *,
    bits: int,
    group_size: int | None,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight float32 [N, K]: entries of the codebook, rounded to `dtype`, times the scale of their group; arguments
    as in `codebook_linear`."""
    check_layout(bits, group_size, (2, 3, 4))
    check_packed(packed, in_features, bits)
    codes = unpack_codes(packed, in_features, bits, codebook=True).long()
    entries = codebook.to(dtype).float().expand(packed.shape[0], -1).gather(1, codes)
    return entries * _by_column(scale, group_size, in_features)


def codebook_linear_reference(
    x: torch.Tensor, packed: torch.Tensor, codebook: torch.Tensor, scale: torch.Tensor,
    bias: torch.Tensor | None = None, *, bits: int, group_size: int | None, in_features: int,
) -> torch.Tensor:  # fmt: skip
    """x [M, K] times the transposed weight, whose entries are rounded to the dtype of x, plus bias: [M, N] in
    float32."""
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    weight = dequantize_codebook_reference(packed, codebook, scale, dtype=x.dtype, **layout)
    return F.linear(x.float(), weight, None if bias is None else bias.float())


def gate_up_silu_reference(
    x: torch.Tensor, gate: tuple, up: tuple, *, bits: int, group_size: int | None, in_features: int
) -> torch.Tensor:
    """silu of the product with `gate` times the product with `up`, tuples (packed, scale, zero_point, bias) as in
    `weight_only_linear`: [M, N] in float32."""
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return F.silu(weight_only_linear_reference(x, *gate, **layout)) * weight_only_linear_reference(x, *up, **layout)
