"""`generate(past_key_values=PagedCache(config, num_blocks=n))` compiles its decode step, as for a static cache.

On accelerators it is compiled once for all lengths, by default with CUDA graphs. One inside of transformers is wrapped:
`get_compiled_call`, which gives `generate` what it runs at every step. The bookkeeping of a `PagedCache`
(`decode_step`) happens around that call, outside of the compiled graph.
"""

import functools

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.integrations.transformers_releases import cache_name


def register() -> None:
    """Wraps `get_compiled_call`. Idempotent."""
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel.get_compiled_call, "_hf_efficient"):
        PreTrainedModel.get_compiled_call = _with_decode_step(PreTrainedModel.get_compiled_call)


def _with_decode_step(original):
    @functools.wraps(original)
    def get_compiled_call(self, *args, **kwargs):
        compiled = original(self, *args, **kwargs)

        def call(*args, **inputs):
            cache = inputs.get(cache_name())
            if not isinstance(cache, PagedCache):
                return compiled(*args, **inputs)
            if not _is_decode_step(cache, **inputs):  # for example the chunks of a prompt
                return self(*args, **inputs)
            if (positions := inputs.get("position_ids")) is not None:
                # a slice, such as that of the last chunk, has other strides and would need another graph
                inputs["position_ids"] = positions.contiguous()
            with cache.decode_step():
                return compiled(*args, **{**inputs, "attention_mask": None})

        return call

    get_compiled_call._hf_efficient = True
    return get_compiled_call


def _is_decode_step(cache: PagedCache, input_ids=None, inputs_embeds=None, attention_mask=None, **inputs) -> bool:
    """Whether the forward appends one token to every sequence. A mask on an accelerator is not read."""
    new = inputs_embeds if input_ids is None else input_ids
    if not cache.is_compileable or not cache.get_seq_length() or new is None or new.shape[1] != 1:
        return False
    masks = attention_mask.values() if isinstance(attention_mask, dict) else (attention_mask,)
    return all(mask is None or mask.device.type != "cpu" or bool(mask[:, -1].all()) for mask in masks)
