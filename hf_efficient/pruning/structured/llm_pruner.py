"""LLM-Pruner (https://arxiv.org/abs/2305.11627): units are scored by how much the loss changes without them, to first
order.

A unit acts through the input channels by which one linear, its reader, reads it. Removing the unit removes the products
of these channels with the reader's columns, so to first order the loss changes by the sum over tokens of input times
gradient of the loss with respect to the input. The score is the mean square of that over windows of text, because in a
trained model its mean is 0."""

import torch
import torch.nn.functional as F
from torch import nn

from hf_efficient.observers.hooks import watching_inputs


def channel_products(
    model: nn.Module, readers: dict[str, nn.Module], batches: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Name of a reader -> float32 [windows, K] on the CPU: for each window the sum over its tokens of input times
    gradient of the window's mean cross entropy. batches: arguments of the model's forward with "input_ids" int64
    [windows, tokens]."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in readers}

    def see(name: str, x: torch.Tensor) -> None:
        x = x if x.requires_grad else x.requires_grad_()
        x.register_hook(lambda g: found[name].append((x.detach().float() * g.float()).sum(1).cpu()))

    with watching_inputs(readers, see), torch.enable_grad():
        for batch in batches:
            logits, ids = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten().to(logits.device))
            (loss * len(ids)).backward()
    return {name: torch.cat(parts) for name, parts in found.items()}


def unit_scores(columns: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """columns [G, R, C] of a reader and its products [windows, K] -> scores float32 [G, R]."""
    return products[:, columns].sum(-1).square().mean(0)
