"""Codes of a table and their scales, tuned by gradient on what the block computes, as `refine` tunes those of a grid.

A weight is `table[round(u)] * scale` with the table sorted. u is measured in steps of the table, linearly between two
entries, so that rounding it finds the nearest entry. Tuned are u and the logarithm of the scale, both in float32. The
forward rounds both as they will be stored; gradients pass the rounding straight through. The two zeros of
E2M1 are one entry.

Scales that are powers of two have whole exponents, so that one step of an exponent rounds all codes of its group anew.
The gradient of an exponent is the slope between the weights of the two whole exponents beside it. It starts the nearer
to its neighbor the nearer their errors are. (A block of SmolLM2 after GPTQ, 32 steps: 0.95 of the initial error; with
exponents that stay 1.12, which is not kept.)"""

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.transformed_weight import to_plain, to_stored
from hf_efficient.calibration.tuning import TunedWeight
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.methods import inner_format


CODE_RATE, SCALE_RATE = 2e-3, 4e-3  # learning rates of Adam, in steps of the table and relative to the scale
POWER_CODE_RATE, EXPONENT_RATE = 1e-3, 1.6e-2  # of codes beside powers of two, and of their exponents
_MARGIN = 0.49  # largest distance of u from its code at the start


class CodebookWeight(TunedWeight):
    """The parameters are `codes`, float32 [N, G, group] (u above), and `log_scale`, float32 [N, G] or [1, 1]; for
    powers of two `exponent` in its place, float32 [N, G], relative to that of the start."""

    FORMATS = (CodebookFormat,)

    def __init__(self, module: nn.Module, format, tensors: dict[str, torch.Tensor]):
        self.format, self.start, self.dtype = format, tensors, module.weight.dtype
        self.codebook = inner_format(format)
        weight = to_stored(weight_of(module).float(), format, tensors)
        self.columns, self.scale = weight.shape[1], self.codebook.scale(tensors)
        table = self.codebook.table(tensors)
        entries, self.code_of = table.sort(stable=True)
        kept = torch.ones_like(entries, dtype=torch.bool)
        kept[:, 1:] = entries.diff() != 0
        if len(entries) == 1:  # equal entries of a table of one's own each row do not harm, and would make it ragged
            entries, self.code_of = entries[kept][None], self.code_of[kept][None]
        self.entries = entries
        codes = self.codebook.unpack(tensors["qweight"], self.columns).long()
        values = self._grouped(table.expand(len(codes), -1).gather(1, codes))
        index = self._index(values).round_()
        exact = self._grouped(self.codebook.normalised(weight, self.scale))
        self.codes = (index + (self._index(exact) - index).clamp_(-_MARGIN, _MARGIN)).requires_grad_()
        self.is_power = self.codebook.codebook == "mxfp4"
        if self.is_power:
            self.exponent = _between_exponents(exact).requires_grad_()
        else:
            self.log_scale = torch.zeros_like(self.scale).requires_grad_()

    def groups(self) -> list[dict]:
        if self.is_power:
            parts = (self.codes, POWER_CODE_RATE), (self.exponent, EXPONENT_RATE)
        else:
            parts = (self.codes, CODE_RATE), (self.log_scale, SCALE_RATE)
        return [{"params": [part], "lr": rate} for part, rate in parts]

    def compute(self) -> torch.Tensor:
        if self.is_power:
            weight = _Powers.apply(self.codes, self.exponent) * self.scale[..., None]
        else:
            exact = self.scale * self.log_scale.exp()
            stored = exact + (self._stored(exact.detach()) - exact).detach()
            stored = stored.expand(len(self.codes), -1)[..., None]
            weight = _Entries.apply(self.codes, self._rows(self.entries)) * stored
        weight = weight.flatten(1)[:, : self.columns]
        return to_plain(weight, self.format, self.start).to(self.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        places = self.codes
        if self.is_power:
            power = _power(self.exponent)
            places = _places(_rounded(_values(places), power) / power)  # rounded as in `compute`, ties too
        places = places.round().clamp_(0, self.entries.shape[1] - 1).long().flatten(1)[:, : self.columns]
        codes = self._rows(self.code_of).gather(1, places).to(torch.uint8)
        factor = _power(self.exponent)[..., 0] if self.is_power else self.log_scale.exp()
        scales = self._scale_tensors(self.scale * factor)
        return {**self.start, "qweight": self.codebook.pack(codes), **scales}

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        return self.codebook.scale(self._scale_tensors(scale))

    def _scale_tensors(self, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that hold scales [N, G] or [1, 1]; NVFP4's keep the step of the start."""
        return self.codebook.store_scale(scale, self.dtype, self.start.get("scale_scale"))

    def _rows(self, table: torch.Tensor) -> torch.Tensor:
        return table.expand(len(self.codes), -1)

    def _grouped(self, values: torch.Tensor) -> torch.Tensor:
        return self.codebook.grouped(values)

    def _index(self, values: torch.Tensor) -> torch.Tensor:
        """Normalised values [N, G, g] -> their place in the sorted table, in steps, beyond its ends in those of the
        ends."""
        entries = self.entries.expand(len(values), -1).contiguous()
        flat = values.flatten(1).contiguous()
        upper = torch.searchsorted(entries, flat).clamp_(1, entries.shape[1] - 1)
        high, low = entries.gather(1, upper), entries.gather(1, upper - 1)
        gap = high - low
        share = torch.where(gap > 0, (flat - low) / torch.where(gap > 0, gap, 1), 0)
        return (upper - 1 + share).view(values.shape)


class _Entries(torch.autograd.Function):
    """places float32 [N, G, g], sorted entries [N, E] -> the entries at the rounded places, float32 [N, G, g]. The
    gradient is the slope of the table where it is not rounded, and 0 beyond its ends."""

    @staticmethod
    def forward(ctx, places, entries):
        ctx.save_for_backward(places, entries)
        index = places.round().clamp_(0, entries.shape[1] - 1).long().flatten(1)
        return entries.gather(1, index).view(places.shape)

    @staticmethod
    def backward(ctx, gradient):
        places, entries = ctx.saved_tensors
        last = entries.shape[1] - 1
        low = places.floor().clamp_(0, last - 1).long().flatten(1)
        slope = (entries.gather(1, low + 1) - entries.gather(1, low)).view(places.shape)
        inside = (places > -0.5) & (places < last + 0.5)
        return torch.where(inside, gradient * slope, 0), None


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """exponents float32 [N, G] -> the powers of two [N, G, 1] of the nearest whole ones."""
    return torch.exp2(exponent.round())[..., None]


_ZERO = 7  # the place of 0 among the 15 numbers of E2M1


def _values(places: torch.Tensor) -> torch.Tensor:
    """Places in steps of the numbers of E2M1, which are convex on each side -> values, linear between two numbers and
    beyond the ends."""
    steps = (places - _ZERO).abs_()
    value = torch.maximum(steps / 2, steps - 2)
    return torch.maximum(value, steps.mul_(2).sub_(8), out=value).copysign_(places - _ZERO)


def _places(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `_values`."""
    size = values.abs()
    return torch.minimum(torch.minimum(2 * size, size + 2), size / 2 + 4).copysign_(values) + _ZERO


def _rounded(values: torch.Tensor, power: torch.Tensor | float) -> torch.Tensor:
    """values [N, G, g] -> the nearest of the numbers of E2M1 times `power`, [N, G, 1]."""
    values = values / power
    one_bit = values.view(torch.int32).add(1 << 21).bitwise_and_(-1 << 22).view(torch.float32)  # of the mantissa
    halves = (2 * values).round_().div_(2)
    return torch.where(values.abs() < 1, halves, one_bit).clamp_(-6, 6).mul_(power)


def _between_exponents(values: torch.Tensor) -> torch.Tensor:
    """Normalised values [N, G, g] -> where the exponents of the groups start, float32 [N, G]: as far from 0 to the
    neighbor with the lower error as the cube of the ratio of their errors says."""
    lower, own, higher = ((_rounded(values, power) - values).square_().sum(-1) for power in (0.5, 1.0, 2.0))
    share = torch.where(own > 0, own / torch.minimum(lower, higher), 0).clamp_(max=1) ** 3 * _MARGIN
    return torch.where(lower < higher, -share, share)


class _Powers(torch.autograd.Function):
    """places and exponents float32 [N, G, g] and [N, G] -> the number of E2M1 that is nearest to the value at a place,
    at the power of two of the rounded exponent. The gradient of a place is the slope of the table, 0 where the value is
    cut off; that of an exponent the slope between the two powers beside it."""

    @staticmethod
    def forward(ctx, places, exponent):
        ctx.save_for_backward(places, exponent)
        return _rounded(_values(places), _power(exponent))

    @staticmethod
    def backward(ctx, gradient):
        places, exponent = ctx.saved_tensors
        values = _values(places)
        low = torch.exp2(exponent.floor())[..., None]
        step = _rounded(values, 2 * low).sub_(_rounded(values, low))
        steps = (places - _ZERO).abs_()
        slope = torch.where(steps < 4, 0.5, torch.where(steps < 6, 1.0, 2.0))
        is_inside = values.abs_() < 7 * _power(exponent)
        return torch.where(is_inside, slope.mul_(gradient), 0), step.mul_(gradient).sum(-1)
