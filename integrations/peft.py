"""Adapters from PEFT on compressed layers. LoRA needs nothing: `EfficientLinear` is an `nn.Linear` with a gradient for its
input. Merging an adapter needs the dense weight, which this makes first."""

from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import EfficientLinear


def merge_and_unload(peft_model, dtype=None):
    """The plain transformers model with the adapters of `peft_model` merged into dequantized weights of `dtype` (by default
    the model's). PEFT's own `merge_and_unload` cannot add to compressed weights and raises.

    Sparse layers keep their zeros: of what the adapter adds, the part in pruned places is left out, so the merged model
    computes something else than the adapted one did. Adapters of `hf_efficient.recover(lora_rank=...)` learn under the mask
    and lose nothing."""
    model = peft_model.get_base_model()
    pruned = {
        name.removesuffix(".base_layer"): ~module.format.mask(module.canonical(), module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, EfficientLinear) and isinstance(module.format, MaskedFormat)
    }
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize(dtype)
    merged = peft_model.merge_and_unload()
    for name, zeros in pruned.items():
        weight = merged.get_submodule(name).weight
        weight.data.masked_fill_(zeros if weight.shape == zeros.shape else zeros.t(), 0)
    return merged
