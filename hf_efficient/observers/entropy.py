"""The range whose 8-bit histogram diverges least from the one of the activations (Szymon Migacz, 8-bit inference with
TensorRT, GTC 2017)."""

import torch

from hf_efficient.observers.histogram import BINS, HistogramObserver


LEVELS = 128  # codes on one side of zero, and the fewest bins that a range may keep
_SMOOTHING = 1e-4  # added to every bin, in counts


class EntropyObserver(HistogramObserver):
    """Among ranges [-a, a] of 128 to 2048 bins of |x|, the one with the smallest Kullback-Leibler divergence between
    the clipped histogram and its quantization to 128 levels. If not symmetric, it is cut to the observed range."""

    def _clip(self, histogram):
        counts = histogram.magnitudes().double()
        best = torch.full_like(histogram.limit, torch.inf)
        kept = torch.full_like(best, BINS)
        for bins in range(LEVELS, BINS + 1):
            divergence = clipped_divergence(counts, bins)
            better = divergence < best
            best, kept = torch.where(better, divergence, best), torch.where(better, bins, kept)
        magnitude = (kept * histogram.width[:, 0]).float()
        return -magnitude, magnitude


def clipped_divergence(counts: torch.Tensor, bins: int) -> torch.Tensor:
    """KL(P || Q), float64 [U], of histograms [U, BINS].

    P is the first `bins` bins, with everything beyond added to the last. Q has `LEVELS` levels of equal width, each
    spread evenly over its bins that are not empty. 1e-4 is added to every bin of both, so that a distant outlier can be
    clipped."""
    inside = counts[:, :bins]
    filled = (inside > 0).double()
    level = (torch.arange(bins, device=counts.device) * LEVELS // bins).expand_as(inside)
    per_level = [c.new_zeros(len(c), LEVELS).scatter_add_(1, level, c) for c in (inside, filled)]
    q = (per_level[0] / per_level[1].clamp_min(1)).gather(1, level) * filled + _SMOOTHING
    p = torch.cat([inside[:, :-1], counts[:, bins - 1 :].sum(1, keepdim=True)], 1) + _SMOOTHING
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    return (p * (p / q).log()).sum(1)
