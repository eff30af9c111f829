"""Norms and biases of a model while they are trained: float32 beside the rounded ones that the model computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_efficient.layers import CompressedModule


class Vectors:
    """The parameters of one dimension of `model`, but for those that belong to a compressed weight.

    Attributes:
        stored: the parameters.
        exact: float32 [n] for each of them; what an optimizer changes.
    """

    def __init__(self, model: nn.Module):
        found = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                is_own = not isinstance(module, CompressedModule) or name == "bias"
                if is_own and parameter.ndim == 1 and parameter.is_floating_point():
                    found[id(parameter)] = parameter
        self.stored = list(found.values())
        self.exact = [parameter.detach().float().clone().requires_grad_() for parameter in self.stored]
        self._start = [parameter.detach().clone() for parameter in self.stored]

    def groups(self, rate: float) -> list[dict]:
        """Groups of parameters for an optimizer. rate: relative to the mean of a vector's absolute values."""
        return [{"params": [own], "lr": rate * own.detach().abs().mean().item()} for own in self.exact]

    @contextmanager
    def trained(self) -> Iterator[None]:
        """Inside, the model's vectors get gradients."""
        before = [parameter.requires_grad for parameter in self.stored]
        try:
            for parameter in self.stored:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter, was in zip(self.stored, before):
                parameter.grad = None
                parameter.requires_grad_(was)

    def gather(self) -> None:
        """Moves the gradients of the model's vectors to `exact`."""
        for own, parameter in zip(self.exact, self.stored):
            own.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Rounds `exact` into the model."""
        for own, parameter in zip(self.exact, self.stored):
            parameter.copy_(own)

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the model the vectors of the beginning."""
        for own, parameter in zip(self._start, self.stored):
            parameter.copy_(own)
