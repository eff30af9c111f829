"""What the loss of the whole model says of each weight, for the pruning methods that ask for it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.sensitivity import language_loss_gradients


@dataclass
class LinearGradients:
    """Of the summed language modelling loss, for the weight of one linear.

    gradient: float32 [N, K], the absolute value of the gradient of a window, summed over windows.
    fisher: float32 [N, K], the square of the gradient of a token, summed over tokens.
    """

    gradient: torch.Tensor
    fisher: torch.Tensor


def gradients(
    model: nn.Module, names: Iterable[str], tokens: torch.Tensor, blocks: Iterable[nn.Module] = ()
) -> dict[str, LinearGradients]:
    """One backward pass over `tokens` int64 [windows, length], window by window, where the model's weights are; what it keeps
    in memory besides the result is what `sensitivities` keeps, which also tells the other arguments and errors."""
    modules = {name: model.get_submodule(name) for name in names}
    found = {}
    for name, module in modules.items():
        zeros = torch.zeros(weight_of(module).shape, device=module.weight.device)
        found[name] = LinearGradients(zeros, zeros.clone())

    def add(name: str, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        rows, deltas = (x.detach().float().flatten(0, -2) for x in (inputs, gradient))
        found[name].gradient += (deltas.t() @ rows).abs_()
        found[name].fisher.addmm_(deltas.square_().t(), rows.square())

    language_loss_gradients(model, modules, tokens, blocks, add)
    for name, own in found.items():
        if not (own.gradient.isfinite().all() and own.fisher.isfinite().all()):
            raise ValueError(f"{name}: the gradients of the calibration loss are not finite")
    return found
