"""Token by token on a CPU: what `generate()` runs for models whose forwards can be recorded."""

import torch
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_efficient.cache.paged_layer import PagedLayer
from hf_efficient.generation import model_state
from hf_efficient.generation.left_padding import is_left_padded
from hf_efficient.generation.replay.captured_forward import is_being_watched
from hf_efficient.generation.sequences import STATEFUL, longest


def serves(
    model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
) -> bool:
    """Whether `generate()` is asked for what this package's loop gives as well, only faster.

    Under `return_dict_in_generate` that is scores, logits and keys and values as transformers' loop leaves them, for one row
    and for rows that end together: with an end-of-sequence token rows of a batch end one by one, and transformers goes on
    with filler in them, which is in all these.
    """
    cache = model_kwargs.get("past_key_values")
    wants_more = generation_config.return_dict_in_generate
    if (
        model.device.type != "cpu"
        or synced_gpus
        or generation_config.is_assistant
        or (wants_more and (generation_config.output_attentions or generation_config.output_hidden_states))
        or (wants_more and type(cache) is not DynamicCache)
        or (wants_more and len(input_ids) > 1 and any(hasattr(c, "eos_token_id") for c in stopping_criteria))
        or is_being_watched()
        or not generation_config.use_cache
        or generation_config.cache_implementation not in (None, "dynamic")
        or (cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()))
        or model.config is not model.config.get_text_config(decoder=True)  # images and sound have inputs of their own
        or input_ids.dim() != 2
        or 0 in input_ids.shape
        or not is_left_padded(input_ids, model_kwargs)
        or (streamer is not None and len(input_ids) > 1)
        or any(isinstance(processor, STATEFUL) for processor in logits_processor)
    ):
        return False
    state = model_state.current(model)
    return state.is_capturable and (state.exact_length is None or longest(stopping_criteria) <= state.exact_length)


def as_transformers(output: GenerateDecoderOnlyOutput, cache: DynamicCache) -> GenerateDecoderOnlyOutput:
    """`output` of this package's loop as transformers' loop returns it: with float32 logits, and the keys and values of
    `output.past_key_values` in `cache`, which is empty. Zeros stand where transformers has those of padding.
    """
    columns = output.sequences.shape[1] - 1
    for index, layer in enumerate(output.past_key_values.layers):
        if isinstance(layer, PagedLayer):
            cache.update(*_contiguous(layer, columns), index)
    logits = output.logits and tuple(step.float() for step in output.logits)
    return GenerateDecoderOnlyOutput(
        sequences=output.sequences, scores=output.scores, logits=logits, past_key_values=cache
    )


def _contiguous(layer: PagedLayer, columns: int) -> list[torch.Tensor]:
    """The keys and values of a layer, [rows, heads, columns, head dim], each row at the right; zeros for what it dropped."""
    pool, result = layer.state.pool, []
    for pages in layer.store.pages.values():
        tensor = pages.new_zeros(len(pool.lengths), columns, *pages.shape[2:])
        for row, (number, dropped) in enumerate(zip(pool.lengths, pool.dropped)):
            tensor[row, columns - number :] = pages.flatten(0, 1)[pool.slots(row, dropped, number)]
        result.append(tensor.transpose(1, 2))
    return result
