"""What tests of `DraftLengthPolicy` share: simulated forwards and proposals."""

import torch

from hf_efficient.generation.speculation.latency_model import LatencyModel
from hf_efficient.generation.speculation.proposal import Proposal


class Remembered(dict):
    """What the calls of one model with one drafter share: keyword arguments of the policy."""

    def __init__(self):
        super().__init__(latency=LatencyModel(), statistics={})


def forward(tokens: int) -> float:
    """Bound by memory up to 8 tokens, then by arithmetic."""
    return 1.0 + 0.02 * tokens + 0.1 * max(0, tokens - 8)


def drafted(rows: int, width: int, acceptance: float | None = None) -> Proposal | None:
    """A proposal of `width` tokens a row, None for none. acceptance: by which the drafter states its confidence."""
    if not width:
        return None
    confidence = None if acceptance is None else torch.full((rows, width), acceptance).cumprod(1)
    return Proposal(torch.zeros(rows, width).long(), torch.full((rows,), width), confidence=confidence)
