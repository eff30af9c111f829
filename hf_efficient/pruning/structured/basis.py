"""The part of the residual stream that stays: x [d] becomes x P, with orthonormal columns P [d, d'], the same in all
layers."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Basis:
    """The matrix P.

    Attributes:
        matrix: P, float32 or float64 [d, d'].
        scale: factor for the output of a norm of d' channels that makes up for the lost ones: sqrt(d / d' * the share
            of the squared norm that P keeps). 1 where nothing is cut.
        rotates: whether P mixes channels, so that the weights of norms must be folded into the linears behind them.
    """

    matrix: torch.Tensor
    scale: float
    rotates: bool

    @classmethod
    def selecting(cls, moments: torch.Tensor, importance: torch.Tensor, size: int) -> "Basis":
        """Keeps the `size` channels of the largest importance [d]. moments: [d], mean squares of normalized tokens."""
        kept = importance.topk(size).indices.sort().values
        share = (moments[kept].sum() / moments.sum()).item()
        matrix = torch.eye(len(importance), device=moments.device, dtype=torch.float32)[:, kept]
        return cls(matrix, (len(importance) / size * share) ** 0.5, False)

    def cut(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """`tensor` with P applied along one axis, in its dtype."""
        matrix = self.matrix.to(tensor.device)
        wide = tensor.to(torch.promote_types(tensor.dtype, matrix.dtype)).movedim(axis, -1)
        return (wide @ matrix.to(wide.dtype)).movedim(-1, axis).to(tensor.dtype)


class Moments:
    """Second moments of tokens x [..., d], each divided by its root mean square, as norms divide the residual stream.

    Args:
        covariance: whether to sum x^T x [d, d], not only its diagonal.
    """

    def __init__(self, width: int, covariance: bool, device=None):
        self.covariance = torch.zeros(width, width, device=device, dtype=torch.float32) if covariance else None
        self._sum_square, self.count = torch.zeros(width, device=device, dtype=torch.float32), 0

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
    """The vector [d] by which an RMSNorm multiplies a token of root mean square 1, found by running it, because some
    norms multiply by (1 + weight). None for a module that computes something else, as LayerNorm does."""
    width = len(norm.weight)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, width, generator=generator, dtype=torch.float32).add_(0.5)
    rows = (rows / rows.square().mean(-1, keepdim=True).sqrt()).to(norm.weight)
    with torch.no_grad():
        ratio = norm(rows).float() / rows.float()
    gain = ratio.median(0).values
    tolerance = 4 * torch.finfo(norm.weight.dtype).eps
    same = (ratio - gain).abs() <= tolerance * gain.abs() + 1e-4 * gain.abs().max()
    return gain if same.float().mean() > 0.99 else None
