"""What the layers of a model's decoder see of the text, by its config."""

from transformers.cache_utils import get_layer_types_and_kwargs


_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_NO_LAYER_TYPES = ("dummy",)


def layer_types_of(config, decoder) -> tuple[list[str], list[dict]]:
    """The kind of every layer of the decoder, and transformers' arguments of its cache layer. Raises ValueError for those that
    this cache cannot hold."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"config={name}: PagedCache holds decoder-only models, not encoder-decoder ones")
    if getattr(decoder, "num_attention_heads", None) is None:
        raise ValueError(f"config={name}: PagedCache holds attention layers, and this model has none")
    layer_types, layer_kwargs = get_layer_types_and_kwargs(decoder)
    unknown = sorted({kind for kind in layer_types if kind not in _LAYER_TYPES + _NO_LAYER_TYPES})
    if unknown:
        raise ValueError(f"config={name}: PagedCache cannot hold layers of type {unknown}, only {list(_LAYER_TYPES)}")
    return layer_types, layer_kwargs


def windows_of(config, decoder) -> list[int | None]:
    """How many tokens each layer of the decoder sees: None for all, 0 for a layer that stores nothing."""
    windows = []
    for kind, kwargs in zip(*layer_types_of(config, decoder)):
        window = kwargs["sliding_window"] or None if kind == "sliding_attention" else None
        windows.append(0 if kind in _NO_LAYER_TYPES else window)
    return windows
