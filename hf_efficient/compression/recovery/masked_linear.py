"""Linear layers while they are trained after pruning: float32 weights whose pruned entries stay zero."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.layers import EfficientLinear


class MaskedLinear(nn.Linear):
    """Takes the place of a linear layer while it is trained. Computes in the dtype of its input.

    Attributes:
        weight: float32 [N, K], 0 where pruned.
        mask: [N, K] in the dtype of the layer, 1 = kept and 0 = pruned; None for a dense layer. Pruned entries get no
            gradient, so an optimizer that works element by element leaves them 0. What others make of them is left out.
    """

    def __init__(self, origin: nn.Module):
        nn.Module.__init__(self)
        self._origin = (origin,)  # a tuple, so that it does not become a submodule
        self.transposed = isinstance(origin, Conv1D) or getattr(origin, "transposed", False)
        sparse = isinstance(origin, EfficientLinear)
        mask = origin.format.mask(origin.canonical(), origin.in_features).to(self.dtype()) if sparse else None
        weight = origin.dequantized(dtype=torch.float32) if sparse else origin.weight.detach().float()
        weight = weight.t() if self.transposed and not sparse else weight
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.contiguous().clone())
        self.bias = origin.bias
        self.register_buffer("mask", mask, persistent=False)
        self.train(origin.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, masked_cast(self.weight, self.mask, x.dtype), self.bias)

    def dtype(self) -> torch.dtype:
        """Dtype of the weight before and after training."""
        return self._origin[0].weight.dtype

    def is_finite(self) -> bool:
        return self.weight.isfinite().all().item()

    @torch.no_grad()
    def packed(self) -> nn.Module:
        """The original layer with this weight, rounded to its dtype."""
        origin = self._origin[0].to(self.weight.device)
        weight = masked_cast(self.weight, self.mask, self.dtype())
        if isinstance(origin, EfficientLinear):
            tensors = origin.format.pack(weight, self.mask.bool())
            origin.restore_canonical()
            for name, tensor in tensors.items():
                origin._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        else:
            origin.weight.copy_(weight.t() if self.transposed else weight)
        return origin.train(self.training)


def masked_cast(weight: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """weight [N, K] in `dtype`; its gradient is 0 where mask ([N, K] of 0 and 1, or None) is 0."""
    return _MaskedCast.apply(weight, mask, dtype)


class _MaskedCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, mask, dtype):
        ctx.mask, ctx.dtype = mask, weight.dtype
        cast = weight.to(dtype, copy=True)
        return cast if mask is None else cast.mul_(mask)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.mask is not None:
            gradient = gradient * ctx.mask
        return gradient.to(ctx.dtype), None, None
