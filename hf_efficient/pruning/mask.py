"""How many weights of a matrix are kept, and which of them compete."""

from dataclasses import dataclass

import torch


GROUPS = ("row", "layer")


@dataclass(frozen=True)
class Sparsity:
    """The zeros that a pruned weight [N, K] has.

    Attributes:
        sparsity: fraction of zeros, 0 <= sparsity < 1; 1 - n/m for a pattern.
        pattern: (n, m) keeps n of every m neighbours along in_features, 0 < n < m; None: unstructured.
        group: which weights compete where there is no pattern: those of a "row" (each output keeps the same number) or
            of the "layer".

    Raises:
        ValueError: for other values; names the field, the value and what is allowed.
    """

    sparsity: float
    pattern: tuple[int, int] | None = None
    group: str = "row"

    def __post_init__(self):
        check_sparsity(self.sparsity)
        if self.pattern is None:
            _require(self.group in GROUPS, "group", self.group, f"one of {GROUPS}")
            return
        n, m = self.pattern
        _check_pattern(n, m)
        _require(self.group == "row", "group", self.group, "'row' with a pattern")
        _require(self.sparsity == 1 - n / m, "sparsity", self.sparsity, f"{1 - n / m} for pattern {n}:{m}")

    @classmethod
    def of_pattern(cls, n: int, m: int) -> "Sparsity":
        """n kept of every m."""
        _check_pattern(n, m)
        return cls(1 - n / m, (n, m))

    def competitors(self, out_features: int, in_features: int) -> tuple[int, int]:
        """(number of weights in a group that compete, number of them kept), for a weight [out_features, in_features].

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
        """bool [N, K], True = kept: the largest scores [N, K] of each group, the first of equal ones. Scores have any
        real dtype and no NaN."""
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


def check_sparsity(sparsity) -> None:
    """Raises ValueError unless `sparsity` is a fraction of zeros."""
    is_share = type(sparsity) in (int, float) and 0 <= sparsity < 1
    _require(is_share, "sparsity", sparsity, "a number of at least 0 and below 1")


def _check_pattern(n: int, m: int) -> None:
    is_pattern = type(n) is int and type(m) is int and 0 < n < m
    _require(is_pattern, "pattern", (n, m), "(n, m), n kept of every m neighbours, 0 < n < m")


def _require(is_allowed: bool, field: str, value, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{field}={value!r} is not supported: it must be {allowed}")
