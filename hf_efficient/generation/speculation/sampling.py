"""One token from scores or probabilities: the most probable one, or one drawn by a random number."""

import functools

import numpy as np
import torch
from torch.nn.functional import pad


_BLOCK = 256  # tokens of the vocabulary whose probabilities are summed first: 10 times faster than one running sum


class Uniforms:
    """A number in [0, 1) for every sequence and position, the same each time it is asked for.

    The target draws its token at a position by this number, whatever was drafted. So one seed gives the same text with
    any drafter and any draft length. The seed comes from torch's generator when the first number is asked for.
    """

    @functools.cached_property
    def seed(self) -> np.uint64:
        return np.uint64(torch.randint(2**63 - 1, ()).item())

    def __call__(self, rows: list[int], positions: np.ndarray) -> torch.Tensor:
        """rows: indices into the batch. positions: int64 [len(rows), n] >= 0. Returns float64 [len(rows), n], CPU."""
        with np.errstate(over="ignore"):  # splitmix64 (Steele, Lea, Flood 2014) of a counter
            x = (np.array(rows, dtype=np.uint64)[:, None] << np.uint64(32)) + positions.astype(np.uint64)
            x = self.seed + (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
        return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(-1)`, by numpy on a CPU, which takes a tenth of torch's time.

    Of equal scores, or of NaNs, the first wins, as in torch. One difference: in bfloat16 a NaN whose sign bit is set is
    not found when another score is above 0.
    """
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.bfloat16):
        return scores.argmax(-1)
    scores = scores.detach()
    if scores.dtype is torch.bfloat16:  # as int16 the bits of non-negative numbers are in the order of the numbers
        found = torch.from_numpy(scores.view(torch.int16).numpy().argmax(-1))
        if (scores.gather(-1, found[..., None]) > 0).all():
            return found
        scores = scores.float()
    return torch.from_numpy(scores.numpy().argmax(-1))


def draw(probabilities: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """One token from each distribution [rows, width, vocabulary]: int64 [rows, width].

    uniforms: float64 [rows, width] in [0, 1), the points of the cumulative distributions; None: torch's generator.
    """
    if uniforms is None:
        return torch.multinomial(probabilities.flatten(0, 1), 1).view(probabilities.shape[:2])
    missing = -probabilities.shape[-1] % _BLOCK  # first the block of the vocabulary, then the token in it
    blocks = (pad(probabilities, (0, missing)) if missing else probabilities).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    wanted = uniforms[..., None] * sums[..., -1:]
    block = _first_beyond(sums, wanted)
    wanted = wanted - pad(sums, (1, 0)).gather(-1, block)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, _BLOCK))[..., 0, :].cumsum(-1, dtype=torch.float64)
    return (block * _BLOCK + _first_beyond(inside, wanted))[..., 0]


def _first_beyond(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Index of the first of the running sums [..., n] that exceeds `wanted` [..., 1].

    Where rounding puts `wanted` at the total, the last entry that added anything: a token of probability 0 is never
    chosen. At least one sum must be above 0.
    """
    below_total = torch.nextafter(sums[..., -1:], torch.zeros_like(wanted))
    return torch.searchsorted(sums, torch.minimum(wanted, below_total), right=True)
