"""Merging adapters from PEFT into the weights of a compressed model."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import CompressedModule


def merge_and_unload(peft_model, dtype=None):
    """The plain transformers model with the adapters of `peft_model` merged into dequantized weights of `dtype` (by
    default the model's). PEFT's own `merge_and_unload` refuses: it would have to round the merged weights again.

    Sparse layers keep their zeros: of what the adapter adds, the part in pruned places is left out, so the merged model
    computes something else than the adapted one did. Adapters of `hf_efficient.recover(lora_rank=...)` learn under
    the mask and lose nothing.

    Raises ValueError for adapters that are no part of the weights, such as prompts, and for those of a compressed
    embedding that shares its weight."""
    model = peft_model.get_base_model()
    if not hasattr(type(peft_model.base_model), "merge_and_unload"):
        kinds = ", ".join(sorted({type(config).__name__ for config in peft_model.peft_config.values()}))
        raise ValueError(f"{kinds} adds nothing to the weights that could be merged: keep the adapter beside the model")
    sources = {module.source for module in model.modules() if hasattr(module, "source")}
    for name, module in model.named_modules():
        if name.endswith(".base_layer") and (module in sources or hasattr(module, "source")):
            raise ValueError(
                f"{name.removesuffix('.base_layer')} is adapted, and others have its weight, too (tied embeddings): "
                "merged, the adapter would change all of them; keep it beside the model"
            )
    zeros, transposed = {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, CompressedModule) or "original_module" in name.split("."):
            continue
        merged_name, is_adapted = name.replace(".base_layer", ""), name.endswith(".base_layer")
        is_transposed = getattr(module, "transposed", False)
        for weight in module.compressed_weights():
            if isinstance(weight.format, MaskedFormat):
                pruned = ~weight.format.mask(module.canonical(weight.prefix), weight.in_features)
                flipped = is_transposed or getattr(module, "is_transposed", False)
                leaf = weight.prefix[:-1] or "weight"
                zeros[f"{merged_name}.{leaf}"] = pruned.transpose(-1, -2) if flipped else pruned
        if is_adapted and is_transposed:
            transposed[name] = merged_name
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize(dtype)
    for name in transposed:  # the adapter was made for [out_features, in_features]
        model.set_submodule(name, _as_linear(model.get_submodule(name)))
    merged = peft_model.merge_and_unload()
    for name in transposed.values():
        merged.set_submodule(name, _as_conv1d(merged.get_submodule(name)))
    for name, pruned in zeros.items():
        merged.get_parameter(name).data.masked_fill_(pruned, 0)
    return merged


def _as_linear(conv: Conv1D) -> nn.Linear:
    new = nn.Linear(conv.nx, conv.nf, device="meta")
    return _with_weight(new, conv)


def _as_conv1d(linear: nn.Linear) -> Conv1D:
    with torch.device("meta"):
        new = Conv1D(linear.out_features, linear.in_features)
    return _with_weight(new, linear)


def _with_weight(new: nn.Module, old: nn.Module) -> nn.Module:
    """`new` with the transposed weight of `old`, its bias and its hook."""
    new.weight = nn.Parameter(old.weight.data.t().contiguous(), requires_grad=old.weight.requires_grad)
    new.bias = old.bias
    if hasattr(old, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, old._hf_hook)
    return new.train(old.training)
