"""Linear layers whose weights are entries of a codebook: NF4, FP4 and learned tables of 4, 8 and 16 entries."""

import torch

from .packing import check_layout
from .weight_only import DTYPES, _check_device, _check_input, _check_scales, _dequantize, _differentiable


# 4-bit NormalFloat: quantiles of a normal distribution, scaled to [-1, 1]. QLoRA (https://arxiv.org/abs/2305.14314),
# appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' 4-bit float: a sign, two bits of exponent, one of mantissa, in an order of its own, scaled to [-1, 1]
_FP4_MAGNITUDES = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
FP4 = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))


def check_codebook(packed, codebook, scale, bits, group_size, in_features) -> None:
    """Raises TypeError or ValueError unless these are a weight of `codebook_linear`, on one device."""
    check_layout(bits, group_size, (2, 3, 4))
    _check_scales(packed, scale, None, bits, group_size, in_features)
    shapes = ((2**bits,), (packed.shape[0], 2**bits))
    if codebook.dtype not in DTYPES:
        raise TypeError(f"codebook has dtype {codebook.dtype}: allowed is one of {DTYPES}")
    if tuple(codebook.shape) not in shapes or not codebook.is_contiguous():
        raise ValueError(
            f"codebook has shape {tuple(codebook.shape)}: allowed is a contiguous {shapes[0]} (one of the weight) or "
            f"{shapes[1]} (one a row) for bits={bits}"
        )
    if codebook.device != packed.device:
        raise ValueError(f"codebook is on {codebook.device}, packed on {packed.device}: allowed is one device")


def codebook_linear(
    x: torch.Tensor, packed: torch.Tensor, codebook: torch.Tensor, scale: torch.Tensor,
    bias: torch.Tensor | None = None, *, bits: int, group_size: int | None, in_features: int,
) -> torch.Tensor:  # fmt: skip
    """x times the transpose of the weight codebook[code] * scale, plus bias.

    packed: int32 [N, W] from `pack_codebook_weight`. bits: 2, 3 or 4.
    codebook: [2^bits], or [N, 2^bits] for one a row; float of any kind, contiguous. Entries are rounded to the dtype of
        x; the scale is applied in float32 to the sum of a group.
    x, scale, bias, group_size, the result, gradients, determinism and errors: as in `weight_only_linear` (the codebook
    may not require grad either).

    Entries come from registers on NVIDIA GPUs for 16-bit x, from memory elsewhere.
    """
    check_codebook(packed, codebook, scale, bits, group_size, in_features)
    _check_input(x, bias, packed, in_features)
    _check_device(packed)
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _differentiable(x, bias, packed, scale, None, codebook, layout)


def dequantize_codebook(
    packed: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    *,
    bits: int,
    group_size: int | None,
    in_features: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The weight [N, in_features] in `dtype` (default: that of scale): entries rounded to it, times the scale in
    float32, rounded. Arguments and errors as `codebook_linear`."""
    check_codebook(packed, codebook, scale, bits, group_size, in_features)
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _dequantize(packed, scale, None, codebook, dtype, **layout)
