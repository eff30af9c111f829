"""A model whose layers compute with few-bit copies of their weights; all other tensors are shared."""

import re

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient import methods
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.experts import compress_experts, expert_weight_names, is_fused_experts
from hf_efficient.generation.drafters.layer_skip import skippable_layers
from hf_efficient.generation.drafters.weight_sharing import rebuilt, view_of
from hf_efficient.integrations.transformers_compat import float32_modules
from hf_efficient.layers import compress_linear, is_linear


@torch.no_grad()
def low_precision_modules(model, config: WeightOnlyConfig) -> dict[str, nn.Module]:
    """Few-bit copies of every linear layer and fused experts in the layers of `model`'s decoder, by name. They take no
    memory besides the packed weights.

    Raises ValueError when there is nothing to quantize, or accelerate holds weights elsewhere.
    """
    path, layers = skippable_layers(model)
    fixed = float32_modules(model)
    modules = {}
    for name, module in layers.named_modules(prefix=path):
        if any(re.search(pattern.replace("*", ".*"), f"{name}.weight") for pattern in fixed):
            continue
        if is_linear(module) or type(module) is Conv1D:
            if module.weight.is_meta:
                raise ValueError(
                    f"model={type(model).__name__}: {name} is offloaded, so it cannot be copied in few bits"
                )
            weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
            tensors = methods.quantize(weight.detach(), config.format(), config.method_name())
            modules[name] = compress_linear(module, config.format(), tensors)
        elif is_fused_experts(module):
            modules[name] = _compressed_experts(module, config)
    if not modules:
        raise ValueError(f"model={type(model).__name__}: its layers have no dense linear layers to copy in few bits")
    return modules


def with_modules(model, modules: dict[str, nn.Module]):
    """A view of `model` with these modules in place of its own of that name."""
    return rebuilt(model, lambda name, module: modules.get(name, module))


def _compressed_experts(module: nn.Module, config: WeightOnlyConfig) -> nn.Module:
    new, dense = view_of(module), {name: getattr(module, name) for name in expert_weight_names(module)}
    compress_experts(new, config.format())
    for name, weight in dense.items():
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        each = [methods.quantize(expert, config.format(), config.method_name()) for expert in weight.detach()]
        for part in each[0]:
            stacked = torch.stack([tensors[part] for tensors in each])
            setattr(new, f"{name}_{part}", nn.Parameter(stacked, requires_grad=False))
    return new
