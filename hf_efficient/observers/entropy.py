"""The range whose 8-bit histogram diverges least from the one of the activations (Szymon Migacz, 8-bit inference with
TensorRT, GTC 2017)."""

import math

import torch

from hf_efficient.observers.histogram import BINS, HistogramObserver


LEVELS = 128  # codes on one side of zero, and the fewest bins that a range may keep
_SMOOTHING = 1e-4  # added to every bin, in counts
_UNITS = 16  # whose ranges are compared at once: 32 MB a float64 tensor of their levels


class EntropyObserver(HistogramObserver):
    """Among ranges [-a, a] of 128 to 2048 bins of |x|, the one with the smallest Kullback-Leibler divergence between
    the clipped histogram and its quantization to 128 levels. If not symmetric, it is cut to the observed range."""

    def _clip(self, histogram):
        counts = histogram.magnitudes().double()
        divergences = torch.cat([clipped_divergences(some) for some in counts.split(_UNITS)])
        magnitude = ((divergences.argmin(1) + LEVELS) * histogram.width[:, 0]).float()
        return -magnitude, magnitude


def clipped_divergences(counts: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) of histograms, float64 [U, BINS], for each number of kept bins from LEVELS to BINS: float64
    [U, BINS - LEVELS + 1].

    P is the kept bins, with everything beyond added to the last. Q has `LEVELS` levels of equal width, each spread
    evenly over its bins that are not empty. 1e-4 is added to every bin of both, so that a distant outlier can be
    clipped.
    """
    bins = torch.arange(LEVELS, BINS + 1, device=counts.device)
    edges = (torch.arange(LEVELS + 1, device=counts.device) * bins[:, None] + LEVELS - 1) // LEVELS  # of levels

    def up_to(values):  # sums of the bins before each: [U, BINS + 1]
        return torch.nn.functional.pad(values.cumsum(1), (1, 0))

    def in_levels(sums):  # [U, ranges, LEVELS]
        return sums[:, edges].diff(dim=2)

    smooth, filled = counts + _SMOOTHING, (counts > 0).double()
    inside, kept = up_to(counts), in_levels(up_to(filled))
    mass = in_levels(inside)
    level = mass / kept.clamp_min(1) + _SMOOTHING  # Q of a bin that is not empty; of an empty one it is _SMOOTHING
    empty = edges.diff(dim=1) - kept
    cross = ((mass + _SMOOTHING * kept) * level.log()).sum(2) + empty.sum(2) * _SMOOTHING * math.log(_SMOOTHING)
    # the last bin has what lies beyond, too
    last, beyond = smooth[:, bins - 1], inside[:, -1:] - inside[:, bins]
    cross += beyond * torch.where(filled[:, bins - 1] > 0, level[:, :, -1], _SMOOTHING).log()
    own = up_to(smooth * smooth.log())[:, bins] - last * last.log() + (last + beyond) * (last + beyond).log()
    of_p, of_q = (sums + _SMOOTHING * bins.double() for sums in (inside[:, -1:], inside[:, bins]))
    return (own - cross) / of_p - of_p.log() + of_q.log()
