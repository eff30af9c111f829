"""LLM-Pruner (https://arxiv.org/abs/2305.11627): what the loss would lose without a coupled group, to first order.

A group acts through the columns by which one linear reads it, so taking it away is taking the products of these weights with
their inputs away: to first order the loss changes by the sum over tokens of input times gradient of the loss by the input. It is
summed for each window of text, and the squares over the windows (their mean cancels: a trained model has none)."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn


def channel_products(
    model: nn.Module, readers: dict[str, nn.Module], batches: list[dict], loss: Callable[[object, dict], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """name of a reader -> float32 [windows, K] on the CPU: for each window the sum over its tokens of input times gradient.

    Args:
        loss: what the model gives, its arguments -> sum over the windows of their losses.
    """
    found: dict[str, list[torch.Tensor]] = {name: [] for name in readers}

    def watch(name):
        def hook(module, args):
            x = args[0]
            x = x if x.requires_grad else x.requires_grad_()
            x.register_hook(lambda g: found[name].append((x.detach().float() * g.float()).sum(1).cpu()))

        return hook

    with ExitStack() as stack:
        for name, module in readers.items():
            stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        for batch in batches:
            with torch.enable_grad():
                loss(model(**batch), batch).backward()
    return {name: torch.cat(parts) for name, parts in found.items()}


def unit_scores(columns: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """columns [G, R, C] of a reader, its products [windows, K] -> float32 [G, R]: the mean square of what the loss changes by."""
    return products[:, columns].sum(-1).square().mean(0)
