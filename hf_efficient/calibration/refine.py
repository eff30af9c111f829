"""Tunes the numbers of a quantized block together, by gradient on what the block gives: scales and rounding (BRECQ,
https://arxiv.org/abs/2102.05426; SignRound, https://arxiv.org/abs/2309.05516; EfficientQAT's first phase,
https://arxiv.org/abs/2407.11062).

A weight is `scale * (clamp(round(u) + zero_point, 0, levels) - zero_point)`. Tuned are u (in steps of the grid, so that a
new scale moves no code) and the logarithm of the scale, both in float32 and rounded as they will be stored; gradients pass
the rounding as if it were not there (straight through). A method's codes are kept at the start: u is the weight, moved into
the interval that rounds to its code. Zero points stay: a step moves all that the range cuts off at once, and tuning them by
gradient measured no better (2 bits, group 64, a block of SmolLM2: 0.61 of the error at the start, without 0.58).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.blocks import Block, replaced_forwards, weight_of
from hf_efficient.formats import AffineFormat
from hf_efficient.kernels.hadamard import rotate, unrotate_weight


logger = logging.get_logger(__name__)

EPOCHS, EPOCHS_AT_2_BITS = 1, 2  # the coarser the grid, the longer it goes on gaining
CODE_RATE, SCALE_RATE = 2e-3, 4e-3  # of Adam, in steps of the grid and relative
_MARGIN = 0.49  # how far u may start from its code


def refine_block(block: Block, targets: list[torch.Tensor], epochs: float | None = None, seed: int = 0) -> None:
    """Replaces the numbers in `block.tensors` of the linears with `refine=True` in an affine format (transformed inputs
    included); the others compute with the numbers they have, and fused experts with their original weights.

    One step of Adam a batch: batches of about 1,000 tokens do better than larger ones in the same time. The loss is the
    squared error of the block's output, each token relative to its mean square. The numbers at the start are kept where
    the tuned ones do not have a lower loss over all batches.

    Args:
        targets: what the original model gives after the block, [B, T, H] for each batch.
        epochs: passes over the batches; by default one, two where a linear has 2 bits.
        seed: of the order of the batches.
    """
    tuned, forwards = {}, {}
    for name, module in block.linears.items():
        format, tensors = block.formats[name], block.tensors[name]
        if block.schemes[name].refine and isinstance(getattr(format, "inner", format), AffineFormat):
            tuned[name] = _TunedWeight(module, format, tensors)
            forwards[name] = _computes_with(module, tuned[name])
        else:
            weight = format.dequantize(tensors, weight_of(module).shape[1], module.weight.dtype)
            forwards[name] = _computes_with(module, lambda weight=weight: weight)
    if not tuned:
        return
    if epochs is None:
        bits = min(getattr(block.formats[name], "inner", block.formats[name]).bits for name in tuned)
        epochs = EPOCHS_AT_2_BITS if bits == 2 else EPOCHS
    names = list(block.linears)
    parameters = [
        {"params": [weight.codes for weight in tuned.values()], "lr": CODE_RATE},
        {"params": [weight.log_scale for weight in tuned.values()], "lr": SCALE_RATE},
    ]
    with replaced_forwards(block.linears.values(), lambda i: forwards[names[i]]):
        before = mean_loss(block, targets, tuned.values())
        tune(block, targets, parameters, epochs, seed)
        after = mean_loss(block, targets, tuned.values())
    if after < before:
        block.tensors.update({name: weight.tensors() for name, weight in tuned.items()})
    else:
        logger.warning(f"{block.name}: refinement found nothing better (relative error {before:.3g}), kept as it was")


def tune(block: Block, targets: list[torch.Tensor], parameters: list[dict], epochs: float, seed: int) -> None:
    """Adam on the groups `parameters`, a step a batch."""
    batches = len(targets)
    steps = max(1, round(epochs * batches))
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.95), fused=True)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    generator, order = torch.Generator().manual_seed(seed), []
    for _ in logging.tqdm(range(steps), desc=f"{block.name}: refinement", leave=False):
        order = order or torch.randperm(batches, generator=generator).tolist()
        batch = order.pop()
        with torch.enable_grad():
            loss = _loss(block.run(batch), targets[batch])
            (loss * targets[batch].numel()).backward()  # gradients near 1, which float16 holds
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared error relative to each token's mean square: the next block normalizes what it reads, and a few tokens are
    hundreds of times larger than the others."""
    target = target.to(output.device).float()
    error = (output.float() - target).square().mean(-1)
    return (error / target.square().mean(-1).clamp_min(1e-12)).mean()


@torch.no_grad()
def mean_loss(block: Block, targets: list[torch.Tensor], weights=()) -> float:
    """weights: those that are rounded once for all batches."""
    rows = [target[..., 0].numel() for target in targets]
    for weight in weights:
        weight.rounded = weight()
    try:
        total = sum(_loss(block.run(batch), target).item() * n for batch, (target, n) in enumerate(zip(targets, rows)))
    finally:
        for weight in weights:
            weight.rounded = None
    return total / sum(rows)


class _TunedWeight:
    """The numbers of one linear as parameters. Called: the weight [N, K] that acts on the plain input."""

    rounded: torch.Tensor | None = None  # what a call gives while the numbers stay

    def __init__(self, module: nn.Module, format, tensors: dict[str, torch.Tensor]):
        self.format, self.start, self.dtype = format, tensors, module.weight.dtype
        self.affine: AffineFormat = getattr(format, "inner", format)
        weight = self._to_stored(weight_of(module).float())
        self.columns, self.scale = weight.shape[1], tensors["scale"].float()
        width = self.columns if self.affine.group_size in (None, -1) else min(self.affine.group_size, self.columns)

        def grouped(x):
            return F.pad(x.float(), (0, -self.columns % width)).unflatten(1, (-1, width))

        self.zero = tensors.get("zero_point", torch.full_like(self.scale, (self.affine.levels + 1) / 2)).float()
        codes = grouped(self.affine.unpack(tensors["qweight"], self.columns)).sub_(self.zero[..., None])
        exact = grouped(weight).div_(self.scale[..., None])
        self.codes = (codes + (exact - codes).clamp_(-_MARGIN, _MARGIN)).requires_grad_()
        self.log_scale = torch.zeros_like(self.scale).requires_grad_()

    def _stored_scale(self) -> torch.Tensor:
        return self.scale * self.log_scale.exp()

    def _to_stored(self, weight: torch.Tensor) -> torch.Tensor:
        """float32 [N, K] acting on the plain input -> acting on the transformed one, see `TransformedFormat`."""
        if getattr(self.format, "input_scale", False):
            weight = weight / self.start["input_scale"].float()
        if getattr(self.format, "rotation", False):
            weight = rotate(weight, self.start["rotation_signs"])
        return weight

    def __call__(self) -> torch.Tensor:
        if self.rounded is not None:
            return self.rounded
        scale = self._stored_scale().expand(len(self.codes), -1)  # one scale a tensor: [1, 1]
        weight = _FakeQuantize.apply(self.codes, scale, self.zero, self.affine.levels, self.dtype)
        weight = weight.flatten(1)[:, : self.columns]
        if self.format is self.affine:
            return weight.to(self.dtype)
        if self.format.rotation:
            weight = unrotate_weight(weight, self.start["rotation_signs"])
        if self.format.input_scale:
            weight = weight * self.start["input_scale"].float()
        return weight.to(self.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """The canonical tensors."""
        codes = _clamped(self.codes.round(), self.zero[..., None], self.affine.levels) + self.zero[..., None]
        codes = codes.to(torch.uint8).flatten(1)[:, : self.columns]
        return {**self.start, "qweight": self.affine.pack(codes), "scale": self._stored_scale().to(self.dtype)}


class _FakeQuantize(torch.autograd.Function):
    """codes float32 [N, G, g] in signed steps, scale float32 [N, G], zero (integers in float32, [N, G] or [1, 1]) -> float32
    weight [N, G, g], rounded as the canonical tensors will be."""

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
        # 0 where the range cuts the code off; a product with what a comparison gives takes longer
        code_gradient = torch.ops.aten.hardtanh_backward(gradient * scale, rounded, -0.5, ctx.levels + 0.5)
        clamped = rounded.clamp_(0, ctx.levels).sub_(zero)
        return code_gradient, (gradient * clamped).sum(-1), None, None, None


def _clamped(rounded: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    return (rounded + zero).clamp_(0, levels).sub_(zero)


def _computes_with(module: nn.Module, weight):
    return lambda x: F.linear(x, weight(), module.bias)
