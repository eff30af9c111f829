"""Adapters from PEFT on compressed layers. LoRA needs nothing: `EfficientLinear` is an `nn.Linear` with a gradient for its
input. Merging an adapter needs the dense weight, which this makes first."""

from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import EfficientLinear


import torch

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import EfficientLinear


@torch.no_grad()
def merge_and_unload(peft_model, dtype=None):
    """The plain transformers model with the adapters of `peft_model` merged into dequantized weights of `dtype` (by default
    the model's). PEFT's own `merge_and_unload` cannot add to compressed weights and raises.

    Pruned weights stay 0: what an adapter adds there is dropped (`hf_efficient.recover` trains adapters that add nothing)."""
    model, masks = peft_model.get_base_model(), {}
    for name, module in model.named_modules():
        if isinstance(module, EfficientLinear) and isinstance(module.format, MaskedFormat):
            masks[name.removesuffix(".base_layer")] = module.format.mask(module.canonical(), module.in_features)
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize(dtype)
    merged = peft_model.merge_and_unload()
    for name, mask in masks.items():
        weight_of(merged.get_submodule(name)).masked_fill_(~mask, 0)
    return merged
