"""What the loss of the whole model says of each weight, for the pruning methods that ask for it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.sensitivity import language_loss_gradients


@dataclass
class LinearGradients:
    """Of the summed language modelling loss, for the weight of one linear; None where it was not asked for.

    gradient: float32 [N, K], the absolute value of the gradient of a window, summed over windows.
    fisher: float32 [N, K], the square of the gradient of a token, summed over tokens.
    """

    gradient: torch.Tensor | None = None
    fisher: torch.Tensor | None = None


def gradients(
    model: nn.Module, asked: Mapping[str, Collection[str]], tokens: torch.Tensor, blocks: Iterable[nn.Module] = ()
) -> dict[str, LinearGradients]:
    """One backward pass over `tokens` int64 [windows, length], window by window, where the model's weights are; what it keeps
    in memory besides the result is what `sensitivities` keeps, which also tells the other arguments and errors.

    Args:
        asked: name of a linear -> which fields of `LinearGradients`.
    """
    modules = {name: model.get_submodule(name) for name in asked}
    found = {name: LinearGradients(**{field: _zeros(modules[name]) for field in asked[name]}) for name in asked}

    def add(name: str, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        own, (rows, deltas) = found[name], (x.detach().float().flatten(0, -2) for x in (inputs, gradient))
        if own.gradient is not None:
            own.gradient += (deltas.t() @ rows).abs_()
        if own.fisher is not None:
            own.fisher.addmm_(deltas.square().t(), rows.square())

    language_loss_gradients(model, modules, tokens, blocks, add)
    for name, own in found.items():
        if not all(getattr(own, field).isfinite().all() for field in asked[name]):
            raise ValueError(f"{name}: the gradients of the calibration loss are not finite")
    return found


def _zeros(module: nn.Module) -> torch.Tensor:
    return torch.zeros(weight_of(module).shape, device=module.weight.device)
