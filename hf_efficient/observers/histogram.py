"""Histograms of activations, for observers that trade clipping errors against rounding errors."""

import torch

from hf_efficient.observers.base import Observer, extremes


BINS = 2048  # on each side of zero, as in TensorRT's calibration
_TINY = 2.0**-100  # limit of a unit of zeros


class Histogram:
    """Counts of the values of U units. A limit grows by doubling, which adds up pairs of bins, so counts stay exact.

    Attributes:
        counts: int64 [U, 2 * BINS], in bins of equal width over [-limit, limit).
        limit: float64 [U].
        low, high: [U], the observed range.
    """

    def __init__(self, low: torch.Tensor, high: torch.Tensor):
        self.low, self.high = low, high
        # so that no value is at the limit
        self.limit = torch.maximum(-low, high).double().clamp_min(_TINY) * (1 + 2.0**-20)
        self.counts = torch.zeros(len(low), 2 * BINS, dtype=torch.int64, device=low.device)

    @property
    def width(self) -> torch.Tensor:
        """The width of a bin, float64 [U, 1]."""
        return (self.limit / BINS)[:, None]

    def centres(self) -> torch.Tensor:
        """The middle of each bin, float64 [U, 2 * BINS]."""
        return (torch.arange(-BINS, BINS, dtype=torch.float64, device=self.limit.device) + 0.5) * self.width

    def magnitudes(self) -> torch.Tensor:
        """Counts of |x| in bins of [0, limit): int64 [U, BINS]."""
        return self.counts[:, BINS:] + self.counts[:, :BINS].flip(1)

    def add(self, units: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        """Counts units [U, values] of the range [low, high]."""
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        needed = torch.maximum(-low, high).double()
        while (short := needed >= self.limit).any():
            pairs = self.counts[short].view(-1, BINS, 2).sum(2)
            self.counts[short] = torch.nn.functional.pad(pairs, (BINS // 2, BINS // 2))
            self.limit[short] *= 2
        bins = ((units / self.width).floor_().long() + BINS).clamp_(0, 2 * BINS - 1)
        bins += torch.arange(len(bins), device=bins.device)[:, None] * 2 * BINS
        self.counts += torch.bincount(bins.flatten(), minlength=self.counts.numel()).view_as(self.counts)


class HistogramObserver(Observer):
    """Chooses a range from a `Histogram`, in `_clip`."""

    def _accumulate(self, state, units):
        low, high = extremes(units, symmetric=False)
        state = Histogram(low, high) if state is None else state
        state.add(units, low, high)
        return state

    def _limits(self, state):
        low, high = self._clip(state)
        low, high = low.clamp(state.low, state.low.new_zeros(())), high.clamp(state.high.new_zeros(()), state.high)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        return low, high

    def _clip(self, histogram: Histogram) -> tuple[torch.Tensor, torch.Tensor]:
        """(low, high), [U] each; the caller cuts it to the observed range."""
        raise NotImplementedError
