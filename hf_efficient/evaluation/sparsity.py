"""How many weights of a model are zero."""

import torch


@torch.no_grad()
def weight_sparsity(model: torch.nn.Module) -> dict[str, float]:
    """Full name of each compressed linear, and of each weight of compressed experts -> the share of it that is zero, counted
    on what it dequantizes to."""
    found = {}
    for name, module in model.named_modules():
        for weight in getattr(module, "compressed_weights", list)():
            dense = module.dequantized(weight.prefix)
            label = f"{name}.{weight.prefix[:-1]}".rstrip(".")
            found[label] = 1 - dense.count_nonzero().item() / dense.numel()
    return found
