"""The layers of a model's decoder in groups that see equally many tokens, each with bookkeeping of its own."""

from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.integrations.transformers_releases import dummy_layer, layer_types_and_kwargs  # noqa: F401


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NOTHING = "dummy"  # transformers' name of a layer that stores neither keys nor values


def layer_types_of(config, decoder) -> tuple[list[str], list[dict]]:
    """The type of each layer of the decoder, and transformers' arguments of its cache layer.

    Raises ValueError for models with layers that a `PagedCache` cannot hold.
    """
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"config={name}: PagedCache holds decoder-only models, not encoder-decoder ones; use "
            "EncoderDecoderPagedCache(model.config)"
        )
    if getattr(decoder, "num_attention_heads", None) is None:
        raise ValueError(f"config={name}: PagedCache holds attention layers, and this model has none")
    layer_types, layer_kwargs = layer_types_and_kwargs(decoder)
    known = (FULL, SLIDING, CHUNKED)
    if unknown := sorted({kind for kind in layer_types if kind not in (*known, NOTHING)}):
        raise ValueError(f"config={name}: PagedCache cannot hold layers of type {unknown}, only {list(known)}")
    return layer_types, layer_kwargs


def group_layers(
    config, decoder, block_size: int, num_blocks: int | None, keeps_all: bool
) -> tuple[list[CacheState], list[tuple[str, CacheState | None]]]:
    """The groups, the one that keeps most tokens first, and (type, group) of each layer; None for one that stores
    nothing.

    keeps_all: layers of sliding attention keep the tokens behind their window, as those of full attention do.
    """
    layer_types, layer_kwargs = layer_types_of(config, decoder)
    windows = [
        (kwargs["sliding_window"] or None) if kind == SLIDING and not keeps_all else None
        for kind, kwargs in zip(layer_types, layer_kwargs)
    ]
    stored = {window for kind, window in zip(layer_types, windows) if kind != NOTHING}
    states = {
        window: CacheState(decoder, block_size, num_blocks, window)
        for window in sorted(stored, key=lambda window: -(window or float("inf")))
    }
    for state in states.values():
        state.peers = list(states.values())
    groups = [(kind, None if kind == NOTHING else states[window]) for kind, window in zip(layer_types, windows)]
    return list(states.values()), groups
