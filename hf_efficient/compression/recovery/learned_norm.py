"""Norms while a model is trained: their weights learn in float32."""

import inspect
from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from torch.func import functional_call

from hf_efficient.calibration.folding import is_norm
from hf_efficient.layers import CompressedModule


RATE = 0.1  # learning rate relative to the mean of a norm's absolute factors, in units of that of weights under codes


class LearnedNorm(nn.Module):
    """Takes the place of a norm while the model is trained. Computes what the norm computes, in its dtype, and has its
    attributes: models read them.

    Attributes:
        learned: parameter, the float32 weight [d] of the norm.
        weight: the same in the dtype of the norm.
    """

    def __init__(self, origin: nn.Module):
        super().__init__()
        self._origin = (origin,)  # a tuple, so that it does not become a submodule
        self.learned = nn.Parameter(origin.weight.detach().float().clone())
        self.train(origin.training)

    def groups(self, rate: float) -> list[dict]:
        """The weight with its learning rate."""
        size = (self.learned.detach() + _offset(self._origin[0])).abs().mean().item()
        return [{"params": [self.learned], "lr": RATE * rate * (size or 1.0)}]

    @property
    def weight(self) -> torch.Tensor:
        return self.learned.to(self._origin[0].weight.dtype)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_origin":
                raise
            return getattr(self._origin[0], name)

    def forward(self, *inputs, **named):
        return functional_call(self._origin[0], {"weight": self.weight}, inputs, named)

    def is_finite(self) -> bool:
        return self.learned.isfinite().all().item()

    @torch.no_grad()
    def packed(self) -> nn.Module:
        """The original norm with this weight, rounded to its dtype."""
        origin = self._origin[0].to(self.learned.device)
        origin.weight.copy_(self.learned)
        return origin.train(self.training)


@torch.no_grad()
def _offset(norm: nn.Module) -> float:
    """What `norm` adds to its weight: 1.0 for those that multiply by (1 + weight), as Gemma's, else 0.0. Decided by
    running it with a weight of 0, under which others tell no token from its negative."""
    row = torch.randn(1, len(norm.weight), generator=torch.Generator().manual_seed(0)).to(norm.weight)
    tokens, none = torch.cat([row, -row]), torch.zeros_like(norm.weight)
    gate = {"gate": tokens.abs()} if "gate" in inspect.signature(norm.forward).parameters else {}
    try:
        found = functional_call(norm, {"weight": none}, (tokens,), gate)
    except Exception:  # it has another signature
        return 0.0
    return 1.0 if (found[0] != found[1]).any() else 0.0


def learned_norms(model: nn.Module, layers: Collection[str]) -> dict[str, LearnedNorm]:
    """name -> what takes the place of a norm of `model`. Norms inside `layers` learn there; shared ones stay."""
    shared = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    inside = tuple(f"{name}." for name in layers)
    return {
        name: LearnedNorm(module)
        for name, module in model.named_modules()
        if is_norm(module) and not isinstance(module, CompressedModule)  # whose placeholder is a vector, too
        if not f"{name}.".startswith(inside) and shared[id(module.weight)] == 1
    }
