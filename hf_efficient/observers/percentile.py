"""The range of a given share of the values: the rest, the outliers, are clipped."""

import torch

from hf_efficient.observers.histogram import BINS, HistogramObserver


class PercentileObserver(HistogramObserver):
    """Symmetric: [-a, a] such that `percentile` percent of |x| are at most a, up to a bin (1/2048 of the largest).
    Otherwise equal shares of the values lie below and above the range.

    Raises:
        ValueError: a percentile outside (50, 100].
    """

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
    """[U]: how many of the first bins together hold `share` of the counts [U, bins]."""
    total = counts.cumsum(1)
    return 1 + (total < share * total[:, -1:].double()).sum(1)
