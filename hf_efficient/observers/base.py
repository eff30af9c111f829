"""The base class of observers of activation ranges."""

import torch


GRANULARITIES = ("tensor", "token", "channel")
_TOKENS_AT_ONCE = 256  # rows: bounds the memory of per-token histograms


class Observer:
    """Observes activations and chooses the range [low, high] that 8-bit codes should span.

    Args:
        granularity: "tensor" (one range), "channel" (one per index of the last dimension) or "token" (one per observed
            row, in order).
        symmetric: ranges are [-a, a]. Otherwise they contain 0, so that zeros stay exact.

    Raises:
        ValueError: an unknown granularity; activations with NaN or infinity, or of another width than before.
    """

    def __init__(self, granularity: str = "tensor", symmetric: bool = True):
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity={granularity!r} is not supported: it must be one of {GRANULARITIES}")
        self.granularity, self.symmetric = granularity, symmetric
        self._state = None  # not for "token": each row is observed once
        self._token_ranges = []
        self._width = None

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        """Observes activations x [..., K] of any float dtype."""
        if x.numel() == 0:
            return
        rows = x.reshape(-1, x.shape[-1]).float()
        if not torch.isfinite(rows).all():
            raise ValueError("activations hold NaN or infinity")
        if self._width not in (None, x.shape[-1]):
            raise ValueError(f"activations are {x.shape[-1]} wide: earlier ones were {self._width}")
        self._width = x.shape[-1]
        if self.granularity == "token":
            for chunk in rows.split(_TOKENS_AT_ONCE):
                self._token_ranges.append(self._limits(self._accumulate(None, chunk)))
        else:
            units = rows.reshape(1, -1) if self.granularity == "tensor" else rows.t()
            self._state = self._accumulate(self._state, units)

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(low, high), float32 [1], [K] or [rows] for "tensor", "channel" or "token".

        Raises:
            ValueError: nothing was observed."""
        if self._width is None:
            raise ValueError("no activations were seen: there is no range to report")
        if self.granularity == "token":
            low, high = (torch.cat(parts) for parts in zip(*self._token_ranges))
        else:
            low, high = self._limits(self._state)
        return low.float(), high.float()

    def _accumulate(self, state, units: torch.Tensor):
        """The state after observing `units` [U, values], each with a range of its own. state: before; None at the
        start."""
        raise NotImplementedError

    def _limits(self, state) -> tuple[torch.Tensor, torch.Tensor]:
        """The ranges [U] of a state."""
        raise NotImplementedError


def extremes(units: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high), [U] each: the range of units [U, values] and 0."""
    low, high = units.amin(1).clamp_max(0), units.amax(1).clamp_min(0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    return low, high
