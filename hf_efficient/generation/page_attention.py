"""Whether a model's attention can read the pages of a `PagedCache`."""

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient.cache.encoder_decoder_cache import EncoderDecoderPagedCache, encoder_decoder_config
from hf_efficient.cache.over_pages import over_pages
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.model_traits import (
    check_ragged,
    decoder_config,
    has_distance_bias,
    reads_encoder,
    reads_media,
)
from hf_efficient.generation.replay.captured_forward import is_watched
from hf_efficient.integrations.transformers_compat import attention_of, cache_name
from hf_efficient.integrations.transformers_loop import can_use_attention, takes_position_bias
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


_REGISTRIES = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def reads_pages(model, replaces_sdpa: bool) -> bool:
    """Whether the attention of `model` takes keys and values from the pages of its cache. replaces_sdpa: inside
    `over_pages` (see `can_replace_sdpa`)."""
    is_ours = replaces_sdpa or attention_of(decoder_config(model)) in ATTENTION_NAMES
    passes_on = _passes_sources_on if reads_encoder(model) else _passes_pages_on
    return is_ours and not is_watched(model) and passes_on(model, replaces_sdpa)


def attention_functions(config) -> tuple:
    """The functions that compute attention and masks over pages for this config: ours in place of transformers' "sdpa",
    or what a user registered."""
    with over_pages():
        return tuple(registry.get(attention_of(config)) for registry in _REGISTRIES)


def can_replace_sdpa(model) -> bool:
    """Whether this package's attention can replace the model's "sdpa". It must be transformers' own, in a text decoder
    that supports flash attention, with or without an encoder, or after a prompt with images or sound."""
    config = decoder_config(model)
    if attention_of(config) != "sdpa" or not (model.config is config or reads_media(model)):
        return False
    part = model.get_decoder() if reads_media(model) else model  # only prompts need masks for images
    takes_ours = takes_position_bias() if has_distance_bias(model) else can_use_attention(part, ATTENTION_NAMES[0])
    if not takes_ours:
        return False
    return attention_functions(config) == tuple(registry[ATTENTION_NAMES[0]] for registry in _REGISTRIES)


def _passes_pages_on(model, replaces_sdpa: bool) -> bool:
    """Whether the model hands what the cache returns to its attention unchanged: runs a forward of two tokens."""
    try:
        check_ragged(model, 1, "model")
        positions, cache = torch.arange(2, device=model.device)[None], PagedCache(model.config)
        windows = [state.window for state in cache.states]
        if replaces_sdpa:
            cache.attend_over_pages()
        inputs = dict(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=True)
        with torch.no_grad(), cache.forward_context():
            model(**inputs, **{cache_name(): cache})
        cache.rewind([0])
        # the windows must be those of the config, and every layer must have taken part
        is_as_configured = windows == [state.window for state in cache.states]
        return is_as_configured and cache.reads_pages and all(layer.is_initialized for layer in cache._paged_layers)
    except Exception:  # an error of the model's own shows again in transformers' loop
        return False


def _passes_sources_on(model, replaces_sdpa: bool) -> bool:
    """As `_passes_pages_on`, for a decoder beside an encoder, on a CPU. What its cross attention gets is looked at when
    a forward is captured."""
    try:
        check_ragged(model, 1, "model")
        cache = EncoderDecoderPagedCache(encoder_decoder_config(model.config))
        pages, tokens = cache.self_attention_cache, torch.zeros(1, 2, dtype=torch.int64)
        over_pages = not has_distance_bias(model)  # whose own forwards give the bias of all columns
        if replaces_sdpa and over_pages:
            pages.attend_over_pages()
        source = BaseModelOutput(torch.zeros(1, 2, model.config.hidden_size, dtype=model.dtype))
        inputs = {"decoder_input_ids" if model.config.is_encoder_decoder else "input_ids": tokens}
        with torch.no_grad(), pages.forward_context():
            model(**inputs, encoder_outputs=source, **{cache_name(): cache}, use_cache=True)
        pages.crop(-1)
        reads = pages.reads_pages or not over_pages
        return model.device.type == "cpu" and reads and all(layer.is_initialized for layer in pages._paged_layers)
    except Exception:  # an error of the model's own shows again in transformers' loop
        return False
