"""The range of the smallest expected squared error: values outside are clipped, values inside rounded to 8 bits."""

import torch

from hf_efficient.observers.histogram import HistogramObserver


STEPS = 255  # between the ends of an 8-bit grid
# of the observed range, 1.8 % apart; on the CPU also where a model is being loaded, on the meta device
_SHARES = torch.logspace(-2, 0, 256, dtype=torch.float64, device="cpu").tolist()


class MSEObserver(HistogramObserver):
    """The observed range times one of 256 shares from 0.01 to 1. Rounding a value costs step^2 / 12, the mean for
    values that are uniform within a step."""

    def _clip(self, histogram):
        low, high = histogram.low.double(), histogram.high.double()
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        centres = histogram.centres()
        best = torch.full_like(high, torch.inf)
        chosen = torch.ones_like(high)
        for share in _SHARES:
            beyond = centres - centres.clamp((low * share)[:, None], (high * share)[:, None])
            rounding = ((high - low) * share / STEPS).square()[:, None] / 12
            error = (histogram.counts * torch.where(beyond == 0, rounding, beyond.square())).sum(1)
            better = error <= best
            best, chosen = torch.where(better, error, best), torch.where(better, share, chosen)
        return (low * chosen).float(), (high * chosen).float()
