"""Tunes the kept weights of a pruned block together, by gradient on what the block computes (EBFT,
https://arxiv.org/abs/2402.12419).

The masks stay. Letting them move with straight-through gradients measured worse in so few steps (2:4, a block of
SmolLM2, 28 steps: a relative error of 0.0140 instead of 0.0112)."""

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.tuning import TunedWeight, refine_linears


logger = logging.get_logger(__name__)
EPOCHS = 2
RATE = 1e-2  # learning rate of Adam, in units of the root mean square of a linear's kept weights


def refine_sparse_block(block: Block, targets: list[torch.Tensor], epochs: float = EPOCHS) -> None:
    """Tunes the values in `block.tensors` of the linears with `refine=True`, whose formats store values and a mask. The
    arguments and what happens to other linears are as in `tuning.refine_linears`. Fused experts stay as they were
    pruned, and a warning says so."""
    if any(block.schemes[name].refine for name in block.experts):
        logger.warning_once("refine=True tunes no pruned fused experts: they stay as their method pruned them")
    tuned = {
        name: _KeptWeights(module, block.formats[name], block.tensors[name])
        for name, module in block.linears.items()
        if block.schemes[name].refine
    }
    if not tuned:
        return
    parameters = [{"params": [weight.values], "lr": RATE * weight.size()} for weight in tuned.values()]
    refine_linears(block, targets, tuned, parameters, epochs, seed=0)


class _KeptWeights(TunedWeight):
    """The parameter is `values`, float32 [N, K]; pruned entries stay 0."""

    def __init__(self, module: nn.Module, format, tensors: dict[str, torch.Tensor]):
        self.format, self.dtype = format, module.weight.dtype
        values, self.mask = format.codes(tensors, weight_of(module).shape[1])
        self.values = values.float().requires_grad_()

    def size(self) -> float:
        """Root mean square of the kept weights."""
        return self.values.detach()[self.mask].square().mean().sqrt().item()

    def compute(self) -> torch.Tensor:
        return (self.values * self.mask).to(self.dtype)

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.format.pack(self(), self.mask)
