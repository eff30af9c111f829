"""Shares of zeros in the weights of a compressed model."""

import torch


@torch.no_grad()
def weight_sparsity(model: torch.nn.Module) -> dict[str, float]:
    """Name of each compressed linear and each weight of compressed experts -> the share of zeros in it, dequantized."""
    found = {}
    for name, module in model.named_modules():
        for weight in getattr(module, "compressed_weights", list)():
            dense = module.dequantized(weight.prefix)
            label = f"{name}.{weight.prefix[:-1]}".rstrip(".")
            found[label] = 1 - dense.count_nonzero().item() / dense.numel()
    return found
