"""Two binary terms (BiLLM, DB-LLM) tuned by gradient on what the block computes, as `refine` tunes a grid: DB-LLM's
training of its factors, and of the codes with them.

The four numbers of a weight's group are sorted once. u is a weight's place among them, in steps from number to number,
so that rounding it finds the nearest and a new factor moves no code. Tuned are u and the logarithms of the factors'
magnitudes. The forward rounds both as they will be stored; gradients pass the rounding straight through."""

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.transformed_weight import to_plain, to_stored
from hf_efficient.calibration.tuning import TunedWeight
from hf_efficient.formats.binary import LARGEST, DualBinaryFormat, SplitBinaryFormat
from hf_efficient.methods import inner_format


CODE_RATE, FACTOR_RATE = 2e-3, 4e-3  # learning rates of Adam, in steps from number to number and relative to a factor
_MARGIN = 0.49  # largest distance of u from its code at the start


class TwoBitWeight(TunedWeight):
    """The parameters are `places`, float32 [N, K] (u above), and `log_factors`, float32 [N, F]."""

    FORMATS = (SplitBinaryFormat, DualBinaryFormat)

    def __init__(self, module: nn.Module, format, tensors: dict[str, torch.Tensor]):
        self.format, self.start, self.dtype = format, tensors, module.weight.dtype
        self.binary = inner_format(format)
        weight = to_stored(weight_of(module).float(), format, tensors)
        self.columns, self.scale = weight.shape[1], tensors["scale"].float()
        self.factors = tensors["factors"].float()
        codes = self.binary.unpack(tensors["qweight"], self.columns)
        each = torch.arange(4, dtype=torch.uint8, device=codes.device).expand(*codes.shape, 4).unbind(-1)
        numbers = torch.stack([self._values(code, self.factors) for code in each], -1)
        numbers, order = numbers.sort(stable=True)
        self.order = order.to(torch.uint8)  # [N, K, 4]: place -> code
        index = (self.order == codes[..., None]).float().argmax(-1)
        self.places = (index + (_place(weight, numbers) - index).clamp_(-_MARGIN, _MARGIN)).requires_grad_()
        self.log_factors = torch.zeros_like(self.factors).requires_grad_()

    def groups(self) -> list[dict]:
        return [{"params": [self.places], "lr": CODE_RATE}, {"params": [self.log_factors], "lr": FACTOR_RATE}]

    def compute(self) -> torch.Tensor:
        factors = self._factors()
        index = self.places.detach().round().clamp_(0, 3)
        weight = self._values(self._codes(index), factors)
        if torch.is_grad_enabled():
            low = self.places.detach().floor().clamp_(0, 2)
            ends = (self._values(self._codes(place), factors.detach()) for place in (low + 1, low))
            slope = next(ends) - next(ends)
            inside = (self.places.detach() > -0.5) & (self.places.detach() < 3.5)
            weight = weight + (self.places - self.places.detach()) * torch.where(inside, slope, 0)
        return to_plain(weight, self.format, self.start).to(self.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        codes = self.binary.pack(self._codes(self.places.round().clamp_(0, 3)))
        tensors = {**self.start, "qweight": codes, "factors": self._factors().to(torch.int8)}
        return {**tensors, "qweight": self.binary.codes_of(self.binary.integers(tensors, self.columns), tensors)}

    def _factors(self) -> torch.Tensor:
        exact = self.factors * self.log_factors.exp()
        return exact + (exact.round().clamp_(-LARGEST, LARGEST) - exact).detach()

    def _codes(self, places: torch.Tensor) -> torch.Tensor:
        return self.order.gather(-1, places.long()[..., None])[..., 0]

    def _values(self, codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        signs, factors = self.binary.signs(codes, self.start), self.binary.expanded(factors, self.columns)
        return sum(sign * factor for sign, factor in zip(signs, factors)) * self.scale


def _place(weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where weight [N, K] lies among sorted numbers [N, K, 4]: float32 [N, K], beyond the ends in steps of theirs."""
    upper = (weight[..., None] > numbers).sum(-1).clamp_(1, 3)
    low, high = (numbers.gather(-1, (upper - back)[..., None])[..., 0] for back in (1, 0))
    gap = high - low
    return upper - 1 + torch.where(gap > 0, (weight - low) / torch.where(gap > 0, gap, 1), 0)
