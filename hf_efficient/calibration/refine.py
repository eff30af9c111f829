"""Tunes the scales and the rounding of a quantized block together, by gradient on what the block computes (BRECQ,
https://arxiv.org/abs/2102.05426; SignRound, https://arxiv.org/abs/2309.05516; EfficientQAT's first phase,
https://arxiv.org/abs/2407.11062).

A weight is `scale * (clamp(round(u) + zero_point, 0, levels) - zero_point)`. Tuned are u (in steps of the grid, so that
a new scale moves no code) and the logarithm of the scale, both in float32. The forward rounds them as they will be
stored; the gradient passes the rounding straight through. u starts at the weight, moved into the interval that rounds
to the code that the method chose, so all codes are kept at the start. Zero points in floats are tuned, too. Integer
ones stay: one step of a zero point moves everything that the range cuts off, and tuning them by gradient measured no
better (2 bits, group 64, a block of SmolLM2: 0.61 of the initial error with, 0.58 without)."""

import torch
import torch.nn.functional as F
from torch import nn

from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.refine_binary import TwoBitWeight
from hf_efficient.calibration.refine_codebook import CodebookWeight
from hf_efficient.calibration.refine_trellis import TrellisWeight
from hf_efficient.calibration.transformed_weight import to_plain, to_stored
from hf_efficient.calibration.tuning import TunedExperts, TunedWeight, refine_linears
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.group_bits import GroupBitsFormat
from hf_efficient.methods import inner_format


EPOCHS, EPOCHS_AT_2_BITS = 1, 2  # coarser grids go on gaining for longer
CODE_RATE, SCALE_RATE = 2e-3, 4e-3  # learning rates of Adam, in steps of the grid and relative to the scale
ZERO_RATE = 4e-3  # of zero points in floats, in steps of the grid
_MARGIN = 0.49  # largest distance of u from its code at the start


def refine_block(block: Block, targets: list[torch.Tensor], epochs: float | None = None, seed: int = 0) -> None:
    """Tunes the codes and scales in `block.tensors` of the linears and fused experts with `refine=True` in an affine
    format, with a table or of two binary terms, and the factors of those along a trellis (transformed inputs included).
    Batches of about 1,000 tokens do better than larger ones in the same time. What no token of an expert reached stays
    as it is. All experts of a block are in memory, 16 bytes for each of their weights.

    Args:
        targets: outputs of the original model after the block, [B, T, H] for each batch.
        epochs: passes over the batches; by default one, two where a linear has 2 bits or fewer.
        seed: seed of the order of the batches.
    """
    tuned = {
        name: tuned_weight(module, block.formats[name], block.tensors[name])
        for name, module in block.linears.items()
        if block.schemes[name].refine and is_tuned(block.formats[name])
    }
    readers: dict[int, TunedWeight] = {}  # of each tensor the first
    for name, weight in tuned.items():
        first = readers.setdefault(id(block.statistics.get(name, weight)), weight)
        if first is not weight and isinstance(weight, TrellisWeight):
            weight.share(first)
    experts = {
        name: _tuned_experts(block, name)
        for name in block.experts
        if block.schemes[name].refine and is_tuned(block.formats[name].expert(0))
    }
    weights = [*tuned.values(), *(weight for each in experts.values() for weight in each.all())]
    if not weights:
        return
    if epochs is None:
        bits = min(inner_format(weight.format).bits for weight in weights)
        epochs = EPOCHS_AT_2_BITS if bits <= 2 else EPOCHS
    parameters = [group for weight in weights for group in weight.groups()]
    if refine_linears(block, targets, tuned, parameters, epochs, seed, experts):
        block.formats.update({name: weight.format for name, weight in tuned.items()})
        one = {name: each.all()[0].format for name, each in experts.items()}
        block.formats.update({name: format for name, format in one.items() if block.formats[name].experts is None})


def _tuned_experts(block: Block, name: str) -> TunedExperts:
    """The weights of the fused experts `name`."""
    format, prefix = block.formats[name], f"{name}."
    tensors = {key.removeprefix(prefix): x for key, x in block.tensors.items() if key.startswith(prefix)}
    return TunedExperts(
        block.experts[name], tensors, format, lambda module, own, of: _TUNED[type(inner_format(of))](module, of, own)
    )


class _AffineWeight(TunedWeight):
    """The parameters are `codes`, float32 [N, G, group] (u above), `log_scale`, float32 [N, G], and for zero points in
    floats `shift`, float32 [N, G]: what they are beyond the integer nearest to them at the start. Codes are counted
    from that integer."""

    FORMATS = (AffineFormat, GroupBitsFormat)

    def __init__(self, module: nn.Module, format, tensors: dict[str, torch.Tensor]):
        self.format, self.start, self.dtype = format, tensors, module.weight.dtype
        self.affine: AffineFormat | GroupBitsFormat = inner_format(format)
        self.levels = self.affine.levels_of(tensors)
        weight = to_stored(weight_of(module).float(), format, tensors)
        self.columns, self.scale = weight.shape[1], tensors["scale"].float()
        width = self.columns if self.affine.group_size in (None, -1) else min(self.affine.group_size, self.columns)

        def grouped(x):
            return F.pad(x.float(), (0, -self.columns % width)).unflatten(1, (-1, width))

        symmetric = "zero_point" not in tensors
        zero = torch.full_like(self.scale, (self.levels + 1) / 2) if symmetric else tensors["zero_point"]
        self.has_float_zero, self.zero = not symmetric and zero.is_floating_point(), zero.float().round()
        self.shift = (zero.float() - self.zero).requires_grad_(self.has_float_zero)
        codes = grouped(self.affine.codes(tensors, self.columns)).sub_(self.zero[..., None])
        exact = grouped(weight).div_(self.scale[..., None]).add_(self.shift.detach()[..., None])
        self.codes = (codes + (exact - codes).clamp_(-_MARGIN, _MARGIN)).requires_grad_()
        self.log_scale = torch.zeros_like(self.scale).requires_grad_()

    def groups(self) -> list[dict]:
        zero = [{"params": [self.shift], "lr": ZERO_RATE}] if self.has_float_zero else []
        return [{"params": [self.codes], "lr": CODE_RATE}, {"params": [self.log_scale], "lr": SCALE_RATE}, *zero]

    def _stored_scale(self) -> torch.Tensor:
        return self.scale * self.log_scale.exp()

    def compute(self) -> torch.Tensor:
        scale = self._stored_scale().expand(len(self.codes), -1)  # [1, 1] where the tensor has one scale
        weight = _FakeQuantize.apply(self.codes, scale, self.zero, self.levels, self.dtype)
        if self.has_float_zero:
            exact = self.zero + self.shift
            shift = self.shift + (self._stored(exact.detach()) - exact).detach()
            weight = weight - (shift * (scale + (self._stored(scale.detach()) - scale).detach()))[..., None]
        weight = weight.flatten(1)[:, : self.columns]
        return to_plain(weight, self.format, self.start).to(self.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        codes = _clamped(self.codes.round(), self.zero[..., None], self.levels) + self.zero[..., None]
        codes = codes.to(torch.uint8).flatten(1)[:, : self.columns]
        parts = {"scale": self._stored_scale().to(self.dtype)}
        if self.has_float_zero:
            parts["zero_point"] = (self.zero + self.shift).to(self.dtype)
        return {**self.start, **self.affine.with_codes(codes, self.start), **parts}

    def _stored(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype).float()


_TUNED = {
    format: weight
    for weight in (_AffineWeight, CodebookWeight, TrellisWeight, TwoBitWeight)
    for format in weight.FORMATS
}


def is_tuned(format) -> bool:
    """Whether weights in `format` have parts that are tuned."""
    return type(inner_format(format)) in _TUNED


def tuned_weight(module: nn.Module, format, tensors: dict[str, torch.Tensor]) -> TunedWeight:
    """The weight of the linear `module`, whose codes and scales stand in `tensors`, to be tuned."""
    return _TUNED[type(inner_format(format))](module, format, tensors)


def share_factors(tuned: dict[str, TunedWeight]) -> None:
    """Linears along trellises that the tuning of their block gave the same factors of inputs go on sharing them."""
    first: dict[str, list[TrellisWeight]] = {}  # by the module that holds the linears
    for name, weight in tuned.items():
        if isinstance(weight, TrellisWeight) and "input_scale" in weight.start:
            siblings = first.setdefault(name.rpartition(".")[0], [])
            if not any(weight.share(other) for other in siblings):
                siblings.append(weight)


class _FakeQuantize(torch.autograd.Function):
    """codes float32 [N, G, g] in signed steps, scale float32 [N, G], zero (integers in float32, [N, G] or [1, 1]) ->
    float32 weight [N, G, g], rounded as it will be stored. levels: the largest code, one number or float32 [G, 1]."""

    @staticmethod
    def forward(ctx, codes, scale, zero, levels, dtype):
        scale, zero = scale.to(dtype).float()[..., None], zero[..., None]
        ctx.save_for_backward(codes, scale, zero)
        ctx.levels = levels
        return _clamped(codes.round(), zero, levels).mul_(scale)

    @staticmethod
    def backward(ctx, gradient):
        codes, scale, zero = ctx.saved_tensors
        rounded = codes.round().add_(zero)
        if torch.is_tensor(ctx.levels):
            is_inside = (rounded > -0.5) & (rounded < ctx.levels + 0.5)
            code_gradient = torch.where(is_inside, gradient * scale, 0)
        else:  # 0 where the range cuts the code off; faster than a product with a comparison
            code_gradient = torch.ops.aten.hardtanh_backward(gradient * scale, rounded, -0.5, ctx.levels + 0.5)
        clamped = _clamped(rounded.sub_(zero), zero, ctx.levels)
        return code_gradient, (gradient * clamped).sum(-1), None, None, None


def _clamped(rounded: torch.Tensor, zero: torch.Tensor, levels: int | torch.Tensor) -> torch.Tensor:
    codes = rounded + zero
    if torch.is_tensor(levels):
        return torch.minimum(codes.clamp_(min=0), levels).sub_(zero)
    return codes.clamp_(0, levels).sub_(zero)
