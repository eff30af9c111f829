"""What is left of the residual stream: x becomes x P, for P [d, d'] with orthonormal columns, the same in all
layers."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Basis:
    """matrix: P, float32 or float64 [d, d']. scale: of what a norm of d' channels gives, for what a norm of all d gave
    in these directions: sqrt(d / d' * the share of the norm that P keeps). 1 where nothing is cut. rotates: whether P
    mixes channels, so that weights of norms have to be folded into the linears behind them."""

    matrix: torch.Tensor
    scale: float
    rotates: bool

    @classmethod
    def selecting(cls, moments: torch.Tensor, importance: torch.Tensor, size: int) -> "Basis":
        """The `size` channels of the largest importance [d], in order. moments: mean squares [d] of normalized
        tokens."""
        kept = importance.topk(size).indices.sort().values
        share = (moments[kept].sum() / moments.sum()).item()
        matrix = torch.eye(len(importance), device=moments.device)[:, kept]
        return cls(matrix, (len(importance) / size * share) ** 0.5, False)

    def cut(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """P applied to one axis of `tensor`, in its dtype."""
        matrix = self.matrix.to(tensor.device)
        wide = tensor.to(torch.promote_types(tensor.dtype, matrix.dtype)).movedim(axis, -1)
        return (wide @ matrix.to(wide.dtype)).movedim(-1, axis).to(tensor.dtype)


class Moments:
    """Sums over tokens x [..., d], each divided by its root mean square: how the norms of a model see its residual
    stream.

    covariance: whether to sum x^T x, not only its diagonal."""

    def __init__(self, width: int, covariance: bool, device=None):
        self.covariance = torch.zeros(width, width, device=device) if covariance else None
        self._sum_square, self.count = torch.zeros(width, device=device), 0

    def update(self, x: torch.Tensor) -> None:
        rows = x.detach().flatten(0, -2).float()
        rows = rows / rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        if self.covariance is not None:
            self.covariance.addmm_(rows.T, rows)
        self._sum_square += rows.square().sum(0)
        self.count += len(rows)

    @property
    def mean_square(self) -> torch.Tensor:
        return self._sum_square / max(self.count, 1)


def rms_gain(norm: nn.Module) -> torch.Tensor | None:
    """The vector [d] that an RMSNorm multiplies a token of root mean square 1 with, found by running it, so that (1 +
    weight) shows; None for a module that does something else, as a LayerNorm."""
    width = len(norm.weight)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, width, generator=generator).add_(0.5)
    rows = (rows / rows.square().mean(-1, keepdim=True).sqrt()).to(norm.weight)
    with torch.no_grad():
        ratio = norm(rows).float() / rows.float()
    gain = ratio.median(0).values
    tolerance = 4 * torch.finfo(norm.weight.dtype).eps
    same = (ratio - gain).abs() <= tolerance * gain.abs() + 1e-4 * gain.abs().max()
    return gain if same.float().mean() > 0.99 else None
