"""Statistics of the inputs of one linear layer, from which methods compute output errors: on the observed rows X, an
approximation Q of W errs by |X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T) with H = X^T X."""

import copy
import math
from collections.abc import Callable

import torch

from hf_efficient.kernels.widened_products import multiplies_bfloat16


_ROWS_AT_ONCE = 8192  # bounds the float32 copy of the inputs
_ROWS_IN_CACHE = 512  # rows at a time for the vectors: they fit a core's cache
_PANEL = 512  # columns of the hessian per product; the lower triangle is mirrored, not computed


class LinearInputs:
    """Statistics of rows x [in_features], in float32, on the device of the rows.

    Args:
        in_features: K, the width of a row.
        hessian: whether to accumulate the sum of x^T x, [K, K], which costs more than all other statistics together.
        name: of the layer, for error messages.
        device: where the statistics are kept.

    Attributes:
        count: number of rows.
        absmax: float32 [K], the largest |x|.
        gradient, fisher, output_hessian: see `LinearGradients`; None where calibration did not compute them.
    """

    gradient = fisher = output_hessian = None

    def __init__(self, in_features: int, hessian: bool = True, name: str = "", device=None):
        self.name, self.count = name, 0
        self.absmax = torch.zeros(in_features, dtype=torch.float32, device=device)
        self._sum_abs = torch.zeros_like(self.absmax)
        self._sum_square = torch.zeros_like(self.absmax)
        self._hessian = torch.zeros(in_features, in_features, device=device, dtype=torch.float32) if hessian else None
        self._mirrored = True

    @property
    def in_features(self) -> int:
        """K, the width of a row."""
        return len(self.absmax)

    @property
    def hessian(self) -> torch.Tensor | None:
        """float32 [K, K], the sum over rows of x^T x, times the row's weight where rows have one, not divided by
        `count`; None when it was not asked for."""
        if not self._mirrored:
            for start in range(0, self.in_features, _PANEL):
                stop = min(start + _PANEL, self.in_features)
                block = self._hessian[start:stop, start:stop]
                block.copy_(block.triu() + block.triu(1).t())
                self._hessian[stop:, start:stop] = self._hessian[start:stop, stop:].t()
            self._mirrored = True
        return self._hessian

    @property
    def mean_abs(self) -> torch.Tensor:
        """float32 [K], the mean of |x|; zeros without rows."""
        return self._sum_abs / max(self.count, 1)

    @property
    def mean_square(self) -> torch.Tensor:
        """float32 [K], the mean of x^2, the diagonal of the hessian over `count`; zeros without rows."""
        return self._sum_square / max(self.count, 1)

    @torch.no_grad()
    def update(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Adds the rows of x [..., K], of any float dtype. weights: float32 [...], 0 and above, of the rows in the
        hessian alone.

        Raises:
            ValueError: for another width, or NaN or infinity among the rows; names the layer.
        """
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{self.name}: inputs of width {x.shape[-1]} where {self.in_features} is expected")
        rows = x.reshape(-1, self.in_features)
        for chunk in rows.split(_ROWS_IN_CACHE):
            magnitude = chunk.abs()
            if len(chunk):
                torch.maximum(self.absmax, magnitude.amax(0).float(), out=self.absmax)
            ones, magnitude = torch.ones(len(chunk), device=x.device, dtype=torch.float32), magnitude.float()
            self._sum_abs += ones @ magnitude
            self._sum_square += ones @ magnitude.square_()
        if not torch.isfinite(self.absmax).all():
            columns = (~torch.isfinite(self.absmax)).nonzero().flatten().tolist()
            raise ValueError(
                f"{self.name}: NaN or infinity in its inputs, in {len(columns)} of {self.in_features} columns, for "
                f"example {columns[:3]}: the model computes them from the calibration data"
            )
        self.count += len(rows)
        if self._hessian is not None:
            if weights is not None:
                rows = rows.float() * weights.to(rows.device).reshape(-1, 1).sqrt()
            for chunk in rows.split(_ROWS_AT_ONCE):
                self._add_products(chunk)
            self._mirrored = False

    def _add_products(self, rows: torch.Tensor) -> None:
        with bfloat16_products(rows.dtype is torch.bfloat16 and rows.device.type == "cpu"):
            rows = rows.float()
            for start in range(0, self.in_features, _PANEL):
                panel = self._hessian[start : start + _PANEL, start:]
                panel.addmm_(rows[:, start : start + _PANEL].t(), rows[:, start:])

    def merge(self, other: "LinearInputs") -> None:
        """Adds the rows of `other`. Raises ValueError for another width, or if only one of the two has a hessian."""
        if (other.in_features, other._hessian is None) != (self.in_features, self._hessian is None):
            raise ValueError(
                f"{self.name}: only statistics of the same width and kind can be merged, not {other.name}'s"
            )
        self.count += other.count
        torch.maximum(self.absmax, other.absmax, out=self.absmax)
        self._sum_abs += other._sum_abs
        self._sum_square += other._sum_square
        if self._hessian is not None:
            self._hessian += other._hessian
            self._mirrored = False

    def with_gradients(self, gradients) -> "LinearInputs":
        """These statistics (shared, not copied) with the `gradient` and `fisher` of one weight."""
        new = copy.copy(self)
        new.gradient, new.fisher = gradients.gradient, gradients.fisher
        new.output_hessian = gradients.output_hessian
        return new

    def rotated(self, rotate: Callable[[torch.Tensor], torch.Tensor]) -> "LinearInputs":
        """The statistics of rotated rows. `absmax` becomes NaN because it does not follow from those of the rows, and
        `mean_abs` that of normal values of the same mean square. Without a hessian all channels get the mean of the
        mean squares, which is what rotations with random signs make of them on average.

        rotate: applies an orthogonal matrix to rows [..., K]."""
        new = LinearInputs(self.in_features, hessian=False, name=self.name, device=self.absmax.device)
        new.count, new.absmax = self.count, torch.full_like(self.absmax, math.nan)
        new.output_hessian = self.output_hessian
        if self._hessian is None:
            new._sum_square = self._sum_square.mean().expand(self.in_features).clone()
        else:
            new._hessian, new._mirrored = rotate(rotate(self.hessian).t().contiguous()), False
            new._sum_square = new._hessian.diagonal().clone()
        new._sum_abs = (new._sum_square * self.count * (2 / math.pi)).sqrt()
        return new

    def scaled(self, scale: torch.Tensor) -> "LinearInputs":
        """The statistics of the rows x * scale; scale: [K]."""
        scale = scale.float()
        new = LinearInputs(self.in_features, hessian=False, name=self.name, device=self.absmax.device)
        new.count, new.output_hessian = self.count, self.output_hessian
        new.absmax = self.absmax * scale.abs()
        new._sum_abs = self._sum_abs * scale.abs()
        new._sum_square = self._sum_square * scale.square()
        if self._hessian is not None:
            new._hessian = self.hessian * torch.outer(scale, scale)
        return new


class bfloat16_products:
    """Inside, if `enabled`, a CPU that has bfloat16 instructions multiplies float32 matrices with them, 2 to 3 times as
    fast. Exact for matrices that hold bfloat16 values: sums are float32."""

    def __init__(self, enabled: bool):
        self.enabled = enabled and multiplies_bfloat16()

    def __enter__(self):
        self.before = torch.backends.mkldnn.matmul.fp32_precision
        if self.enabled:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    def __exit__(self, *exception):
        torch.backends.mkldnn.matmul.fp32_precision = self.before
