"""What of a weight coded along a trellis is no code: a factor a row and a factor an input, tuned by gradient
on what the block computes, as QTIP (https://arxiv.org/abs/2406.11235) tunes its sign vectors."""

import dataclasses

import torch
from torch import nn

from hf_efficient.calibration.transformed_weight import product, to_plain
from hf_efficient.calibration.tuning import TunedWeight
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods import inner_format


RATE = 4e-3  # learning rate of Adam, relative to a factor


class TrellisWeight(TunedWeight):
    """The parameters are the logarithms of the rows' factors, float32 [N, 1], and of the inputs', float32 [K]. The
    latter become the "input_scale" of a `TransformedFormat`. Linears that read one tensor may share them (`share`), so
    that it is scaled and rotated once."""

    FORMATS = (TrellisFormat,)

    def __init__(self, module: nn.Module, format, tensors: dict[str, torch.Tensor]):
        self.start, self.dtype = tensors, module.weight.dtype
        plain = format if isinstance(format, TransformedFormat) else TransformedFormat(format)
        self.format = dataclasses.replace(plain, input_scale=True)
        columns = tensors["qweight"].shape[1]
        self.scale, ones = tensors["scale"].float(), torch.ones_like(tensors["scale"])
        self.values = inner_format(format).dequantize({**tensors, "scale": ones}, columns, torch.float32)
        self.values = to_plain(self.values, dataclasses.replace(plain, input_scale=False), tensors)
        self.input_scale = tensors["input_scale"].float() if plain.input_scale else self.values.new_ones(columns)
        self.log_rows = torch.zeros_like(self.scale).requires_grad_()
        self.log_inputs = torch.zeros_like(self.input_scale).requires_grad_()
        self.own = [self.log_rows, self.log_inputs]

    def groups(self) -> list[dict]:
        return [{"params": self.own, "lr": RATE}]

    def share(self, other: TunedWeight) -> bool:
        """Takes the inputs' factors of `other` for its own, where `other` is such a weight and both begin with the
        same: True."""
        can = isinstance(other, TrellisWeight) and torch.equal(self.input_scale, other.input_scale)
        if can:
            self.log_inputs, self.own = other.log_inputs, [self.log_rows]
        return can

    def product(self, x, module):
        """Inputs are rounded behind the factors as they stand."""
        factors = self._factors()[1].detach().to(self.dtype)
        return product(x, self(), module, self.format, {**self.start, "input_scale": factors})

    def compute(self):
        rows, inputs = self._factors()
        return (self.values * rows * inputs).to(self.dtype)

    @torch.no_grad()
    def tensors(self):
        rows, inputs = self._factors()
        return {**self.start, "scale": rows.to(self.dtype), "input_scale": inputs.to(self.dtype)}

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounded as they will be stored; the gradient passes the rounding straight through."""
        exact = self.scale * self.log_rows.exp(), self.input_scale * self.log_inputs.exp()
        rows, inputs = (value + (value.to(self.dtype).float() - value).detach() for value in exact)
        return rows, inputs
