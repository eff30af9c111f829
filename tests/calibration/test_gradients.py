"""Gradients of the loss for single weights against autograd, and the methods that prune by them."""

import torch
from helpers import assert_close
from test_sensitivity import language_loss

from hf_efficient.calibration.gradients import gradients
from hf_efficient.observers.hooks import watching_outputs
from hf_efficient.pruning import prune
from hf_efficient.pruning.mask import Sparsity


TOKENS = torch.randint(3, 128, (2, 6), generator=torch.Generator().manual_seed(0))
NAME = "model.layers.0.self_attn.o_proj"


def test_against_autograd(llama):
    found = gradients(llama, {NAME: ("gradient", "fisher")}, TOKENS, llama.model.layers)[NAME]
    module = llama.get_submodule(NAME)
    gradient, fisher = torch.zeros(module.weight.shape), torch.zeros(module.weight.shape)
    for window in TOKENS:
        seen = []
        with watching_outputs({NAME: module}, lambda name, args, kwargs, y, seen=seen: seen.extend((args[0], y))):
            loss = language_loss(llama, window)
        delta, whole = torch.autograd.grad(loss, [seen[1], module.weight])
        gradient += whole.abs()
        for row, change in zip(seen[0][0], delta[0]):
            fisher += torch.outer(change, row).square().detach()
    for ours, expected in ((found.gradient, gradient), (found.fisher, fisher)):
        assert_close(ours, expected, 1e-5, 1e-4 * expected.max().item(), "float32 sums in another order")

    weight, target = module.weight.detach(), Sparsity(0.5, group="layer")
    for method, saliency in (("gradient", weight.abs() * gradient), ("obd", weight.square() * fisher / 2)):
        pruned, mask = prune(weight, method, target, found)
        assert saliency[mask].min() >= 0.99 * saliency[~mask].max()  # sums in another order, once more
        assert torch.equal(pruned, weight * mask) and mask.sum() == weight.numel() // 2
