"""Layouts of sparse weights that compute with a dense one."""

import torch
import torch.nn.functional as F


class DenseLinear:
    """A sparse weight as a dense one [N, K], kept in memory: an ordinary product. qweight: () -> the canonical qweight where
    the weight says all of it; None: the canonical qweight stays beside it."""

    def __init__(self, weight: torch.Tensor, qweight=None):
        self.weight, self.dtype, self.qweight = weight, weight.dtype, qweight
        self.replaces_qweight = qweight is not None
        self.tensors = {"packed": weight}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K]."""
        return self.weight


class RestoredLinear:
    """Another layout, and how the canonical qweight comes back: restore(layout)."""

    replaces_qweight = True

    def __init__(self, layout, restore):
        self.layout, self.restore, self.dtype, self.tensors = layout, restore, layout.dtype, layout.tensors
        self.dequantize = layout.dequantize

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.layout(x, bias)

    def qweight(self) -> torch.Tensor:
        """The canonical qweight."""
        return self.restore(self.layout)
