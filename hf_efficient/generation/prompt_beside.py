"""Prompts whose tokens attend to later ones, as image tokens do: they run over a transformers cache, which fills the
pages afterwards."""

import torch
from transformers import DynamicCache

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.integrations.transformers_compat import cache_name
from hf_efficient.integrations.transformers_loop import prefill


def prefill_beside(
    model, cache: PagedCache, input_ids: torch.Tensor, generation_config, model_kwargs: dict
) -> torch.Tensor:
    """Runs the prompts, int64 [rows, columns], as transformers does, and fills the empty `cache`, whose pages the
    model's attention reads: tokens that see later ones need masks, which attention over pages does not take.

    Returns the logits that follow them, [rows, vocabulary].
    """
    beside = DynamicCache()  # without a config its layers keep all tokens, those behind a window too
    given = {**model_kwargs, cache_name(): beside, "use_cache": True}
    logits = prefill(model, input_ids, generation_config, given).logits[:, -1]
    mask = model_kwargs.get("attention_mask")
    cache.fill([(layer.keys, layer.values) for layer in beside.layers], mask)
    return logits
