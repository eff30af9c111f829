"""torch's version counters of tensors, by which `ModelKey` and others detect changed weights. Fused optimizers do not
increase them."""

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


_hooks = []


def register() -> None:
    """Counts the steps of fused optimizers, in this process. Idempotent."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count))


def _count(optimizer: Optimizer, args, kwargs) -> None:
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    changed = [weight for group in groups for weight in group["params"] if weight.grad is not None]
    if changed:
        torch.autograd.graph.increment_version(changed)
