"""The layer with which BitNet b1.58 (https://arxiv.org/abs/2402.17764) trains, and its form for inference."""

import torch
from torch import nn

from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.kernels.linear.w8a8 import quantize
from hf_efficient.layers import EfficientLinear, compress_linear


class StraightThrough(torch.autograd.Function):
    """rounding(tensor), with the gradient of the identity."""

    @staticmethod
    def forward(ctx, tensor, rounding):
        return rounding(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class BitLinear(nn.Linear):
    """A linear layer [..., in_features] -> [..., out_features] with ternary weights (by absmean) and inputs in int8
    (one scale a token), for training. Gradients pass straight through both roundings to the float `weight`
    [out_features, in_features] and the input. Paper: BitNet b1.58 (https://arxiv.org/abs/2402.17764).

    A checkpoint of a model with such layers is an ordinary one. `from_pretrained(...,
    quantization_config=BitNetConfig())` makes the same ternary weights of it.

    Args:
        rms_norm: normalise the input first (the paper's SubLN), by a child module of that name.
        eps: of that norm.
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
    """

    def __init__(
        self, in_features, out_features, bias=True, rms_norm: bool = False, eps: float = 1e-6, device=None, dtype=None
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        if rms_norm:
            attach_input_norm(self, nn.RMSNorm(in_features, eps, device=device, dtype=dtype))

    @classmethod
    def of_linear(cls, linear: nn.Linear) -> "BitLinear":
        """A layer that shares the weight and bias of `linear`, for further training."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            StraightThrough.apply(x, _int8), StraightThrough.apply(self.weight, _ternary), self.bias
        )

    @torch.no_grad()
    def compressed(self, dense: bool = False) -> EfficientLinear:
        """The layer for inference, without the float weight. dense: as in `TernaryFormat`."""
        format = TernaryFormat(dense=dense)
        new = compress_linear(self, format, format.round(self.weight))
        if hasattr(self, "rms_norm"):
            attach_input_norm(new, self.rms_norm)
        return new


def attach_input_norm(linear: nn.Linear, norm: nn.Module) -> None:
    """Makes `norm` the child `rms_norm` of `linear` (its name in transformers' BitNet layers), applied to the input."""
    linear.rms_norm = norm
    linear.register_forward_pre_hook(_normalise)


def _normalise(module, args):
    return module.rms_norm(args[0]), *args[1:]


def _ternary(weight: torch.Tensor) -> torch.Tensor:
    format = TernaryFormat()
    return format.dequantize(format.round(weight), weight.shape[1], weight.dtype)


def _int8(x: torch.Tensor) -> torch.Tensor:
    codes, scale, _ = quantize(x.reshape(-1, x.shape[-1]), "int8")
    return (codes.float() * scale).to(x.dtype).view(x.shape)
