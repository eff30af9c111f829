"""The range of all observed values: nothing is clipped, and a single outlier decides it."""

import torch

from hf_efficient.observers.base import Observer, extremes


class AbsMaxObserver(Observer):
    """Symmetric: [-max|x|, max|x|]; otherwise [min(x, 0), max(x, 0)]."""

    def _accumulate(self, state, units):
        low, high = extremes(units, self.symmetric)
        return (low, high) if state is None else (torch.minimum(state[0], low), torch.maximum(state[1], high))

    def _limits(self, state):
        return state
