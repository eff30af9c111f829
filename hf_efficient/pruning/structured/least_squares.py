"""The best values of weights that stay: least squares towards the outputs of the dense model on calibration data (as
OBC and ZipLM, https://arxiv.org/abs/2302.04089, but for the inputs that the pruned model computes)."""

import torch


DAMPING = 0.01  # of the mean of the diagonal; pulls towards the weights before the correction


class Correction:
    """The correction of the weight [N, K] of one linear, in the dtype of the errors: float32 or float64."""

    def __init__(self):
        self.products: torch.Tensor | None = None
        self.errors: torch.Tensor | None = None

    def update(self, x: torch.Tensor, error: torch.Tensor, weight: torch.Tensor) -> None:
        """x: inputs [T, K]; error: wanted minus actual outputs [T, N]; weight: weights of the squared errors of rows
        [T]."""
        x = x.to(error.dtype)
        weighted = x * weight[:, None]
        products, errors = weighted.T @ x, error.T @ weighted
        self.products = products if self.products is None else self.products.add_(products)
        self.errors = errors if self.errors is None else self.errors.add_(errors)

    def solve(self) -> torch.Tensor:
        """What to add to the weight, [N, K]: minimises the weighted squared error plus `DAMPING` times the squared
        change."""
        damping = DAMPING * self.products.diagonal().mean().clamp_min(torch.finfo(self.products.dtype).tiny)
        system = self.products + damping * torch.eye(len(self.products), dtype=self.products.dtype).to(self.products)
        return torch.cholesky_solve(self.errors.T, torch.linalg.cholesky(system)).T
