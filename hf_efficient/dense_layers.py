"""Ordinary layers made of compressed ones."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.embeddings import EfficientEmbedding, TiedEmbedding, restored
from hf_efficient.experts import EfficientExperts, decompress_experts
from hf_efficient.layers import CompressedModule, EfficientLinear


NO_PLACE_FOR_NORMS = "an ordinary model has no place for the norms inside the linear layers (rms_norm_eps)"


def make_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Puts ordinary layers, with weights of `dtype` (by default the model's), in the place of the compressed ones.

    Raises:
        ValueError: weights are offloaded, or layers normalise their inputs.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, CompressedModule)}
    if any(hasattr(module, "rms_norm") for module in modules.values()):
        raise ValueError(f"dequantize(): {NO_PLACE_FOR_NORMS}")
    if offloaded := [name for name, module in modules.items() if module.is_offloaded]:
        raise ValueError(
            f"dequantize() needs every weight in memory, but {len(offloaded)} modules are offloaded, for example "
            f"{offloaded[:3]}: load with a device_map without 'disk' or cpu offload, or pass dequantize=True when "
            "loading"
        )
    shared = {}  # embedding -> its dense weight, which what is tied to it has as well
    for module in modules.values():
        if isinstance(module, EfficientEmbedding):
            shared[module] = nn.Parameter(module.dequantized(dtype=dtype or module.weight.dtype))
    for name, module in modules.items():
        weight = shared.get(getattr(module, "source", module))
        if isinstance(module, (EfficientEmbedding, TiedEmbedding)):
            model.set_submodule(name, dense_embedding(module, weight))
        elif isinstance(module, EfficientLinear):
            model.set_submodule(name, dense_linear(module, dtype or module.weight.dtype, weight))
        elif isinstance(module, EfficientExperts):
            decompress_experts(module, dtype or module._parameters[module._expert_names[0]].dtype)


def dense_embedding(module: EfficientEmbedding | TiedEmbedding, weight: nn.Parameter) -> nn.Embedding:
    """The ordinary embedding that `module` stands for, with its hook and the `weight` [num_embeddings,
    embedding_dim]."""
    new = restored(module)
    new.weight = weight
    return _with_hook(new, module)


def dense_linear(module: EfficientLinear, dtype: torch.dtype, weight: nn.Parameter | None = None) -> nn.Module:
    """The ordinary layer that `module` stands for, with its hook. weight: [out_features, in_features] where another
    module has it, too."""
    weight = nn.Parameter(module.dequantized(dtype=dtype)) if weight is None else weight
    if module.transposed:
        new = Conv1D(module.out_features, module.in_features)
        new.weight = nn.Parameter(weight.data.t().contiguous())
        new.bias = module.bias
    else:
        has_bias = module.bias is not None
        new = module.original(module.in_features, module.out_features, has_bias, device="meta", dtype=dtype)
        new.weight, new.bias = weight, module.bias
    if new.bias is not None:
        new.bias.data = new.bias.data.to(dtype)
    return _with_hook(new, module)


def _with_hook(new: nn.Module, module: nn.Module) -> nn.Module:
    new.train(module.training)
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, module._hf_hook)
    return new
