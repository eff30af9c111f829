"""What the observers of activation ranges share."""

import torch


GRANULARITIES = ("tensor", "token", "channel")
_TOKENS_AT_ONCE = 256


class Observer:
    """Sees activations and says which range [low, high] 8-bit codes should span.

    Args:
        granularity: "tensor" (one range), "channel" (one for each of the last dimension), or "token" (one for each row
            that was seen, in that order).
        symmetric: ranges are [-a, a]. Otherwise they hold 0 (so that zeros stay exact).

    Raises:
        ValueError: an unknown granularity; activations with NaN or infinity, or of another width than before.
    """

    def __init__(self, granularity: str = "tensor", symmetric: bool = True):
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity={granularity!r} is not supported: it must be one of {GRANULARITIES}")
        self.granularity, self.symmetric = granularity, symmetric
        self._state = None  # of "tensor" and "channel"; a token is seen only once
        self._token_ranges = []
        self._width = None

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        """Takes in activations x [..., K] of any float dtype."""
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
        """(low, high), float32: [1], [rows] or [K], as the granularity says.

        Raises ValueError when nothing was seen."""
        if self._width is None:
            raise ValueError("no activations were seen: there is no range to report")
        if self.granularity == "token":
            low, high = (torch.cat(parts) for parts in zip(*self._token_ranges))
        else:
            low, high = self._limits(self._state)
        return low.float(), high.float()

    def _accumulate(self, state, units: torch.Tensor):
        """The state after `units` [U, values], each of which gets a range of its own; None: nothing was seen before."""
        raise NotImplementedError

    def _limits(self, state) -> tuple[torch.Tensor, torch.Tensor]:
        """The ranges [U] of a state."""
        raise NotImplementedError


def extremes(units: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The range [U] that holds everything in units [U, values], and 0."""
    low, high = units.amin(1).clamp_max(0), units.amax(1).clamp_min(0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    return low, high
