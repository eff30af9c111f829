"""Keeps the best of the grids offered for each group of a weight."""

import torch

from hf_efficient.formats import AffineFormat
from hf_efficient.methods._affine_grid import Grid, covering_grid, group_importance, group_width, grouped, stored


class GridSearch:
    """Minimises sum importance |w - q|^power over each group of weight [N, K], starting with the grid that covers it.

    Args:
        importance: float [K], weights of the columns; None: all equal.

    Attributes:
        scale, zero, error: the best grid so far and its error, [N, G] ([1, 1] for a format with one scale per tensor).
        values: the weight, float32 [width, groups], so that operations run along groups.
        importance: float32 [width, groups], 0 for padding; None: all equal.
    """

    def __init__(self, weight: torch.Tensor, format: AffineFormat, importance: torch.Tensor | None, power: float = 2.0):
        self.levels, self.dtype, self.power = format.levels, weight.dtype, power
        self.float_zero = format.zero_point == "float"
        self.scale, self.zero = covering_grid(weight, format)
        values = grouped(weight, group_width(format, weight.shape[1]))
        importance = group_importance(importance, format, weight.shape[1])
        self.importance = None if importance is None else self._by_group(importance.to(values.device).expand_as(values))
        self.values = self._by_group(values)
        self._scratch = torch.empty_like(self.values)  # one for all grids: new memory for each costs page faults
        self.error = self.error_of(self.scale, self.zero)

    def _by_group(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(self.scale.numel(), -1).T.contiguous()

    def centred_codes(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """code - zero point, float32 [width, groups]; in memory that the next call, or `error_of`, writes again."""
        zero = zero.reshape(-1)
        places = torch.div(self.values, scale.float().reshape(-1), out=self._scratch)
        if self.float_zero:
            return places.add_(zero).round_().clamp_(0, self.levels).sub_(zero)
        return places.round_().clamp_(-zero, self.levels - zero)

    def error_of(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The error of a grid, float32 shaped as `scale`."""
        error = self.centred_codes(scale, zero).mul_(scale.float().reshape(-1)).sub_(self.values)
        error = error.square_() if self.power == 2 else error.abs_().pow_(self.power)
        if self.importance is not None:
            error.mul_(self.importance)
        return error.sum(0).view(scale.shape)

    def offer(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Takes the grid for the groups whose error it lowers."""
        error = self.error_of(scale, zero)
        better = error < self.error
        self.scale, self.zero = torch.where(better, scale, self.scale), torch.where(better, zero, self.zero)
        self.error = torch.where(better, error, self.error)

    def best(self) -> Grid:
        """The best grid."""
        return self.scale, self.zero

    def as_stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales [groups] as the format stores them, shaped as `scale`; those that are not positive become the best so
        far."""
        return stored(torch.where(scale > 0, scale, self.scale.reshape(-1)).view(self.scale.shape), self.dtype)
