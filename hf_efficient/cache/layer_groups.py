"""The layers of a model's decoder in groups that see equally many tokens, each with bookkeeping of its own."""

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.paged_layer import PagedLayer
from hf_efficient.cache.recurrent_layer import RecurrentLayer
from hf_efficient.integrations.transformers_releases import dummy_layer, layer_types_and_kwargs  # noqa: F401


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
RECURRENT, HYBRID = ("conv", "linear_attention"), "hybrid"  # a state, and a state beside keys and values
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
    known = (FULL, SLIDING, CHUNKED, *RECURRENT, HYBRID)
    if unknown := sorted({kind for kind in layer_types if kind not in (*known, NOTHING)}):
        raise ValueError(f"config={name}: PagedCache cannot hold layers of type {unknown}, only {list(known)}")
    if not set(layer_types) - {*RECURRENT, NOTHING}:
        raise ValueError(f"config={name}: PagedCache holds attention layers, and this model has none")
    return layer_types, layer_kwargs


def group_layers(
    config, decoder, block_size: int, num_blocks: int | None, keeps_all: bool
) -> tuple[list[CacheState], list[tuple[str, CacheState | None]]]:
    """The groups, the one that keeps most tokens first, and (type, group) of each layer; None for one that stores
    no tokens.

    keeps_all: layers of sliding attention keep the tokens behind their window, as those of full attention do.
    """
    layer_types, layer_kwargs = layer_types_of(config, decoder)
    windows = [
        (kwargs["sliding_window"] or None) if kind == SLIDING and not keeps_all else None
        for kind, kwargs in zip(layer_types, layer_kwargs)
    ]
    without = (NOTHING, *RECURRENT)
    stored = {window for kind, window in zip(layer_types, windows) if kind not in without}
    states = {
        window: CacheState(decoder, block_size, num_blocks, window)
        for window in sorted(stored, key=lambda window: -(window or float("inf")))
    }
    for state in states.values():
        state.peers = list(states.values())
    groups = [(kind, None if kind in without else states[window]) for kind, window in zip(layer_types, windows)]
    return list(states.values()), groups


class HybridLayer(PagedLayer, LinearAttentionCacheLayerMixin):
    """A layer with keys and values in pages, and beside them a state, which `recurrent` holds."""

    is_compileable = False
    record_past = False

    def __init__(self, *arguments, number_of_states: int = 1):
        self.recurrent = RecurrentLayer(number_of_states)
        PagedLayer.__init__(self, *arguments)

    conv_states = property(lambda self: self.recurrent.conv_states)
    recurrent_states = property(lambda self: self.recurrent.recurrent_states)
    has_previous_state = property(lambda self: self.recurrent.has_previous_state)

    def update_conv_state(self, *args, **kwargs) -> torch.Tensor:
        return self.recurrent.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args, **kwargs) -> torch.Tensor:
        return self.recurrent.update_recurrent_state(*args, **kwargs)


def make_layers(decoder, groups: list[tuple[str, CacheState | None]], evicts: bool, exact: bool) -> list:
    """The layers of a `PagedCache`. evicts: those of full attention keep only some of their tokens. exact: see
    `PagedLayer`."""
    layers, arguments = [], layer_types_and_kwargs(decoder)[1]
    for index, (kind, state) in enumerate(groups):
        own = state, index, evicts and kind == FULL, kind in (SLIDING, CHUNKED), exact
        count = arguments[index].get("number_of_states", 1)
        if kind in RECURRENT:
            layers.append(RecurrentLayer(count))
        elif kind == HYBRID:
            layers.append(HybridLayer(*own, number_of_states=count))
        else:
            layers.append(dummy_layer() if state is None else PagedLayer(*own))
    return layers


def recurrent_of(layers: list) -> list[RecurrentLayer]:
    """What holds the states among the layers of a cache."""
    held = (getattr(layer, "recurrent", layer) for layer in layers)
    return [layer for layer in held if isinstance(layer, RecurrentLayer)]
