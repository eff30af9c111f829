"""The range that holds a given share of the values: the rest, the outliers, are clipped."""

import torch

from hf_efficient.observers.histogram import BINS, HistogramObserver


class PercentileObserver(HistogramObserver):
    """[-a, a] with `percentile` percent of |x| at most a (to a bin, 1/2048 of the largest); not symmetric: an equal
    share of the values is below and above the range.

    Raises ValueError for a percentile that is not in (50, 100]."""

    def __init__(self, granularity: str = "tensor", symmetric: bool = True, percentile: float = 99.99):
        super().__init__(granularity, symmetric)
        if not 50 < percentile <= 100:
            raise ValueError(f"percentile={percentile!r} is not supported: it must be above 50 and at most 100")
        self.share = percentile / 100

    def _clip(self, histogram):
        if self.symmetric:
            magnitude = (_bins_holding(histogram.magnitudes(), self.share) * histogram.width[:, 0]).float()
            return -magnitude, magnitude
        share = (1 + self.share) / 2
        low, high = (_bins_holding(counts, share) - BINS for counts in (histogram.counts.flip(1), histogram.counts))
        width = histogram.width[:, 0]
        return (-low * width).float(), (high * width).float()


def _bins_holding(counts: torch.Tensor, share: float) -> torch.Tensor:
    """How many bins from the first on hold `share` of the counts [U, bins]: [U]."""
    total = counts.cumsum(1)
    return 1 + (total < share * total[:, -1:].double()).sum(1)
