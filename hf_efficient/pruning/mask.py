"""How many weights of a matrix are kept, and among which neighbours they compete."""

from dataclasses import dataclass

import torch


GROUPS = ("row", "layer")


@dataclass(frozen=True)
class Sparsity:
    """What a pruned weight [N, K] is to look like.

    Attributes:
        sparsity: fraction of zeros, 0 <= sparsity < 1; 1 - n/m for a pattern.
        pattern: (n, m) keeps n of every m neighbours along in_features, 0 < n < m; None: unstructured.
        group: what competes where there is no pattern: the weights of a "row" (each output keeps the same number) or of the
            "layer".

    Raises:
        ValueError: for other values; names the field, the value and what is allowed.
    """

    sparsity: float
    pattern: tuple[int, int] | None = None
    group: str = "row"

    def __post_init__(self):
        if error := sparsity_error(self.sparsity) or (self.pattern and pattern_error(self.pattern)):
            raise ValueError(error)
        if self.group not in GROUPS or (self.pattern and self.group != "row"):
            allowed = "'row' with a pattern" if self.pattern else f"one of {GROUPS}"
            raise ValueError(f"group={self.group!r} is not supported: it must be {allowed}")
        if self.pattern and self.sparsity != 1 - self.pattern[0] / self.pattern[1]:
            n, m = self.pattern
            raise ValueError(f"sparsity={self.sparsity!r} is not supported: it must be {1 - n / m} for pattern {n}:{m}")

    @classmethod
    def of_pattern(cls, n: int, m: int) -> "Sparsity":
        """n kept of every m."""
        if error := pattern_error((n, m)):
            raise ValueError(error)
        return cls(1 - n / m, (n, m))

    def competitors(self, out_features: int, in_features: int) -> tuple[int, int]:
        """(how many weights compete with one another, how many of them are kept) in a weight [out_features, in_features].

        Raises:
            ValueError: the pattern does not divide in_features.
        """
        if self.pattern is None:
            count = in_features if self.group == "row" else out_features * in_features
            return count, max(1, round((1 - self.sparsity) * count))
        n, m = self.pattern
        if in_features % m:
            raise ValueError(f"pattern {n}:{m} does not divide in_features={in_features}: it must be a multiple of {m}")
        return m, n

    def kept(self, out_features: int, in_features: int) -> int:
        """The exact number of weights kept of [out_features, in_features]."""
        count, kept = self.competitors(out_features, in_features)
        return out_features * in_features // count * kept

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [N, K], of any real dtype and without NaN, the more important the larger -> bool [N, K], True = kept. Of
        equal scores the first in the matrix are kept."""
        count, kept = self.competitors(*scores.shape)
        return keep_largest(scores.reshape(-1, count), kept).view(scores.shape)


def keep_largest(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """scores [G, W] without NaN -> bool [G, W]: in each row the `kept` (0 to W) largest, the first of equal ones."""
    if kept == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.kthvalue(scores.shape[1] - kept + 1, dim=-1, keepdim=True).values
    above, equal = scores > least, scores == least
    wanted = kept - above.sum(-1, keepdim=True)
    if (equal.sum(-1, keepdim=True) > wanted).any():
        equal &= equal.cumsum(-1) <= wanted
    return above | equal


def sparsity_error(sparsity) -> str | None:
    """What is wrong with a fraction of zeros, or None."""
    if type(sparsity) not in (int, float) or not 0 <= sparsity < 1:
        return f"sparsity={sparsity!r} is not supported: it must be a number of at least 0 and below 1"
    return None


def pattern_error(pattern: tuple[int, int]) -> str | None:
    """What is wrong with (n, m), or None."""
    n, m = pattern
    if type(n) is not int or type(m) is not int or not 0 < n < m:
        return f"pattern={pattern!r} is not supported: it must be (n, m), n kept of every m neighbours, 0 < n < m"
    return None
