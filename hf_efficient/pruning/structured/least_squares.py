"""What the weights that stay should be: least squares against what the dense model gives on calibration data (as OBC
and ZipLM update them, https://arxiv.org/abs/2302.04089, but with the inputs that the pruned model computes)."""

import torch


DAMPING = 0.01  # of the mean of the diagonal: pulls towards the weights as cut


class Correction:
    """Sums for one linear of `rows` outputs and `columns` inputs; float32, or float64 for such rows."""

    def __init__(self):
        self.products: torch.Tensor | None = None
        self.errors: torch.Tensor | None = None

    def update(self, x: torch.Tensor, error: torch.Tensor, weight: torch.Tensor) -> None:
        """x: inputs [T, K]; error: what its outputs lack [T, N]; weight: of the squared error of each row [T]."""
        x = x.to(error.dtype)
        weighted = x * weight[:, None]
        products, errors = weighted.T @ x, error.T @ weighted
        self.products = products if self.products is None else self.products.add_(products)
        self.errors = errors if self.errors is None else self.errors.add_(errors)

    def solve(self) -> torch.Tensor:
        """What to add to the weight, [N, K]: the minimum of the weighted squared error, with `DAMPING` of the
        change."""
        damping = DAMPING * self.products.diagonal().mean().clamp_min(torch.finfo(self.products.dtype).tiny)
        system = self.products + damping * torch.eye(len(self.products), dtype=self.products.dtype).to(self.products)
        return torch.cholesky_solve(self.errors.T, torch.linalg.cholesky(system)).T
