"""Random numbers that belong to a row and a position, so that what is drawn there does not depend on how it was reached."""

import functools

import numpy as np
import torch


class Uniforms:
    """One number in [0, 1) for every row and position, the same each time it is asked for: the target draws its token there
    by it, whatever was drafted, so a seed gives the same text with any drafter and any draft length.

    The seed comes from torch's generator when the first number is asked for.
    """

    @functools.cached_property
    def seed(self) -> np.uint64:
        return np.uint64(torch.randint(2**63 - 1, ()).item())

    def __call__(self, rows: list[int], positions: np.ndarray) -> torch.Tensor:
        """rows: the batch rows. positions: int64 [len(rows), n] >= 0. Returns float64 [len(rows), n] on the CPU."""
        with np.errstate(over="ignore"):  # splitmix64 (Steele, Lea, Flood 2014) of a counter
            x = (np.array(rows, dtype=np.uint64)[:, None] << np.uint64(32)) + positions.astype(np.uint64)
            x = self.seed + (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
        return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)
