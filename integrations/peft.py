"""Adapters from PEFT on compressed layers. LoRA needs nothing: `EfficientLinear` is an `nn.Linear` with a gradient for its
input. Merging an adapter needs the dense weight, which this makes first."""


def merge_and_unload(peft_model, dtype=None):
    """The plain transformers model with the adapters of `peft_model` merged into dequantized weights of `dtype` (by default
    the model's). PEFT's own `merge_and_unload` cannot add to compressed weights and raises."""
    model = peft_model.get_base_model()
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize(dtype)
    return peft_model.merge_and_unload()
