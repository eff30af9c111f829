"""What the kernels must compute, in plain float32 torch on any device."""

import torch

from .packing import check_layout, check_packed, unpack_codes


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
    groups = torch.arange(in_features, device=packed.device)
    groups = groups // group_size if group_size not in (None, -1) else groups * 0
    centre = 2.0 ** (bits - 1) if zero_point is None else zero_point.float()[:, groups]
    return (codes - centre) * scale.float()[:, groups]


def weight_only_linear_reference(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    bits: int,
    group_size: int | None,
    in_features: int,
) -> torch.Tensor:
    """x [M, K] times the transposed weight, plus bias: [M, N] in float32, whatever the dtypes given."""
    weight = dequantize_reference(packed, scale, zero_point, bits=bits, group_size=group_size, in_features=in_features)
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
