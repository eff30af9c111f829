"""Caches of this package in `generate()`: by name, `cache_implementation="paged_int8"` in a call, a pipeline, or a
generation config that is saved with a model; and a check of those that a caller passes, for every model.

transformers has a list of the names, and one method that makes the cache. `cache_implementation="paged"` in a call is
its own: it runs `generate_batch`. In a generation config it is a `PagedCache` in the model's dtype.
"""

import copy
import functools

from hf_efficient.integrations.transformers_releases import cache_name


KV_FORMATS = {"paged": "auto", "paged_int8": "int8", "paged_fp8": "fp8", "paged_int4": "int4", "paged_int2": "int2"}


def register() -> None:
    """Adds the names. Idempotent."""
    from transformers import GenerationMixin
    from transformers.generation import configuration_utils

    names = tuple(name for name in KV_FORMATS if name != "paged")  # which transformers knows
    if names[0] not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS += names
        GenerationMixin._prepare_cache_for_generation = _by_name(GenerationMixin._prepare_cache_for_generation)


def _by_name(original):
    @functools.wraps(original)
    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        cache = model_kwargs.get(cache_name())
        pages = getattr(cache, "self_attention_cache", cache)
        if hasattr(pages, "check_continuation"):
            is_decoders = self.config.is_encoder_decoder
            pages.check_continuation(model_kwargs.get("decoder_attention_mask" if is_decoders else "attention_mask"))
        kv_format = KV_FORMATS.get(generation_config.cache_implementation)
        if generation_config.is_assistant and kv_format is not None:  # a draft in transformers' loop keeps one of its
            generation_config, kv_format = copy.copy(generation_config), None
            generation_config.cache_implementation = None
        if kv_format is None or generation_config.use_cache is False or cache is not None:
            return original(self, generation_config, model_kwargs, *args, **kwargs)
        from hf_efficient.cache.encoder_decoder_cache import EncoderDecoderPagedCache
        from hf_efficient.cache.paged_cache import PagedCache

        kind = EncoderDecoderPagedCache if self.config.is_encoder_decoder else PagedCache
        model_kwargs[cache_name()] = kind(self.config, kv_format=kv_format)

    return _prepare_cache_for_generation
