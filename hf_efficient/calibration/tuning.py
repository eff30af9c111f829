"""Tunes weights of a block by gradient on what the block computes: the loop that all refinements share."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.transformed_weight import product
from hf_efficient.experts import expert_weight_names
from hf_efficient.observers.hooks import replaced_forwards


logger = logging.get_logger(__name__)


class TunedWeight:
    """The weight of one linear as a function of parameters. Called: the weight [N, K] in its dtype that acts on the
    plain input.

    FORMATS: whose weights it tunes. format, start: of the weight, and its canonical tensors when tuning begins."""

    FORMATS: tuple[type, ...] = ()
    start: dict[str, torch.Tensor] = {}
    cached: torch.Tensor | None = None  # what a call returns while no parameter changes

    def __call__(self) -> torch.Tensor:
        return self.compute() if self.cached is None else self.cached

    def product(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """What the linear `module` with this weight makes of x [..., K]."""
        return product(x, self(), module, self.format, self.start)

    def compute(self) -> torch.Tensor:
        """The weight [N, K], with gradients to the parameters."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """The canonical tensors of the weight."""
        raise NotImplementedError


class TunedExperts:
    """The weights of fused experts `module`, each of each expert a `TunedWeight`.

    make: (module with the weight [N, K] of one expert, its canonical tensors, its format) -> `TunedWeight`. tensors:
    name of the parameter -> canonical tensors of all experts, stacked. format: of all experts.
    """

    def __init__(self, module: nn.Module, tensors: dict[str, dict[str, torch.Tensor]], format, make: Callable):
        self.module, self.weights, self.format = module, {}, format
        for name in expert_weight_names(module):
            matrices = getattr(module, name).detach()
            matrices = matrices.transpose(1, 2) if module.is_transposed else matrices
            self.weights[name] = [
                make(_Matrix(matrix), format.unstack(tensors[name], expert, matrix.shape[1]), format.expert(expert))
                for expert, matrix in enumerate(matrices)
            ]

    def all(self) -> list[TunedWeight]:
        return [weight for each in self.weights.values() for weight in each]

    def __call__(self, *args, **kwargs):
        """The module's own forward, over the weights as they are tuned."""
        kept = {name: self.module._parameters[name] for name in self.weights}
        try:
            for name, each in self.weights.items():
                stacked = torch.stack([weight() for weight in each])
                stacked = stacked.transpose(1, 2) if self.module.is_transposed else stacked
                self.module._parameters[name] = stacked
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            self.module._parameters.update(kept)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name of the parameter -> canonical tensors, stacked."""
        made = {name: [weight.tensors() for weight in each] for name, each in self.weights.items()}
        return {name: self.format.stack(each) for name, each in made.items()}


class _Matrix(nn.Module):
    """A linear as far as a `TunedWeight` reads one."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def refine_linears(
    block: Block,
    targets: list[torch.Tensor],
    tuned: Mapping[str, TunedWeight],
    parameters: list[dict],
    epochs: float,
    seed: int,
    experts: Mapping[str, TunedExperts] | None = None,
) -> bool:
    """Tunes `tuned` (name of a linear -> its weight) and `experts`, and writes their tensors to `block.tensors`, unless
    the loss over all batches is not lower than before. Returns whether it is. The other linears compute with the
    tensors they have, other fused experts with their original weights.

    targets: outputs of the original model after the block, [B, T, H] for each batch. parameters: groups of parameters
    for Adam. epochs: passes over the batches, one step a batch, in an order drawn from `seed`.
    """
    names, experts = list(block.linears), experts or {}
    weights = [*tuned.values(), *(weight for each in experts.values() for weight in each.all())]
    modules = [*block.linears.values(), *(each.module for each in experts.values())]

    def forward(index: int):
        if index >= len(names):
            return list(experts.values())[index - len(names)]
        name, module = names[index], block.linears[names[index]]
        if name in tuned:
            return lambda x: tuned[name].product(x, module)
        return quantized_forward(module, block.formats[name], block.tensors[name])

    with replaced_forwards(modules, forward):
        before = mean_loss(block, targets, weights)
        _tune(block, targets, parameters, epochs, seed)
        after = mean_loss(block, targets, weights)
    if after < before:
        block.tensors.update({name: weight.tensors() for name, weight in tuned.items()})
        for name, each in experts.items():
            block.tensors.update({f"{name}.{weight}": tensors for weight, tensors in each.tensors().items()})
    else:
        logger.warning(f"{block.name}: refinement found nothing better (relative error {before:.3g}), kept as it was")
    return after < before


def quantized_forward(module: nn.Module, format, tensors: dict[str, torch.Tensor]):
    """A forward for the linear `module` that computes with the weight in `tensors`."""
    weight = format.dequantize(tensors, weight_of(module).shape[1], module.weight.dtype)
    return lambda x: product(x, weight, module, format, tensors)


def _tune(block: Block, targets: list[torch.Tensor], parameters: list[dict], epochs: float, seed: int) -> None:
    """Adam with a warmup and a cosine schedule, a step a batch."""
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
            (loss * targets[batch].numel()).backward()  # gradients near 1 do not underflow in float16
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared error relative to each token's mean square, because the next block normalizes what it reads, and a few
    tokens are hundreds of times larger than the others."""
    target = target.to(output.device).float()
    error = (output.float() - target).square().mean(-1)
    return (error / target.square().mean(-1).clamp_min(1e-12)).mean()


@torch.no_grad()
def mean_loss(block: Block, targets: list[torch.Tensor], weights=()) -> float:
    """The loss over all batches. weights: `TunedWeight`s, which are computed once for all batches."""
    rows = [target[..., 0].numel() for target in targets]
    for weight in weights:
        weight.cached = weight()
    try:
        total = sum(_loss(block.run(batch), target).item() * n for batch, (target, n) in enumerate(zip(targets, rows)))
    finally:
        for weight in weights:
            weight.cached = None
    return total / sum(rows)
