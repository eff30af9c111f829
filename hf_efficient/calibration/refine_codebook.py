"""Codes of a table and their scales, tuned by gradient on what the block computes, as `refine` tunes those of a grid.

A weight is `table[round(u)] * scale` with the table sorted. u is measured in steps of the table, linearly between two
entries, so that rounding it finds the nearest entry. Tuned are u and the logarithm of the scale, both in float32. The
forward rounds both as they will be stored; gradients pass the rounding straight through. The two zeros of
E2M1 are one entry."""

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.transformed_weight import to_plain, to_stored
from hf_efficient.calibration.tuning import TunedWeight
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.methods import inner_format


CODE_RATE, SCALE_RATE = 2e-3, 4e-3  # learning rates of Adam, in steps of the table and relative to the scale
_MARGIN = 0.49  # largest distance of u from its code at the start


class CodebookWeight(TunedWeight):
    """The parameters are `codes`, float32 [N, G, group] (u above), and, but for powers of two, `log_scale`, float32
    [N, G] or [1, 1]."""

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
        self.log_scale = torch.zeros_like(self.scale)
        if self.codebook.codebook != "mxfp4":
            self.log_scale.requires_grad_()

    def groups(self) -> list[dict]:
        scales = [{"params": [self.log_scale], "lr": SCALE_RATE}] if self.log_scale.requires_grad else []
        return [{"params": [self.codes], "lr": CODE_RATE}, *scales]

    def compute(self) -> torch.Tensor:
        exact = self.scale * self.log_scale.exp()
        stored = exact + (self._stored(exact.detach()) - exact).detach()
        weight = _Entries.apply(self.codes, self._rows(self.entries)) * stored.expand(len(self.codes), -1)[..., None]
        weight = weight.flatten(1)[:, : self.columns]
        return to_plain(weight, self.format, self.start).to(self.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        places = self.codes.round().clamp_(0, self.entries.shape[1] - 1).long().flatten(1)[:, : self.columns]
        codes = self._rows(self.code_of).gather(1, places).to(torch.uint8)
        scales = {}
        if self.log_scale.requires_grad:
            scales = self.codebook.store_scale(self.scale * self.log_scale.exp(), self.dtype)
        return {**self.start, "qweight": self.codebook.pack(codes), **scales}

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        return self.codebook.scale(self.codebook.store_scale(scale, self.dtype))

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
