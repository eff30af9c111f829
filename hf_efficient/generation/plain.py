"""Token by token on a CPU: what `generate()` runs for models whose forwards can be recorded."""

import threading
import weakref
from contextlib import contextmanager

import torch
from torch.nn.modules.module import _has_any_global_hook
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.paged_layer import PagedLayer
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.sequences import STATEFUL
from hf_efficient.generation.taped_forward import TapedForward
from hf_efficient.kernels.attention import ATTENTION_NAMES


def serves(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus,
    streamer,
    model_kwargs,
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
        or torch._C._len_torch_dispatch_stack()  # whoever counts operators would not see them
        or _has_any_global_hook()
        or "prepare_inputs_for_generation" in vars(model)  # PEFT's prompts
        or not generation_config.use_cache
        or generation_config.cache_implementation not in (None, "dynamic")
        or (cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()))
        or model.config is not model.config.get_text_config(decoder=True)  # images and sound have inputs of their own
        or input_ids.dim() != 2
        or 0 in input_ids.shape
        or (streamer is not None and len(input_ids) > 1)
        or any(isinstance(processor, STATEFUL) for processor in logits_processor)
    ):
        return False
    try:
        RaggedModel.check(model, len(input_ids), "model")
    except ValueError:
        return False
    with reading_pages(model):
        return TapedForward.serves(model, PagedCache(model.config, num_blocks=1)) and _takes_pages(model)


_taking: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> attention implementation -> `_takes_pages`


def _takes_pages(model) -> bool:
    """Whether the model hands its attention what its cache handed to it: of two tokens, run once."""
    taking = _taking.setdefault(model, {})
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in taking:
        positions, cache = torch.arange(2)[None], PagedCache(model.config)
        try:
            with torch.no_grad():
                model(torch.zeros_like(positions), position_ids=positions, past_key_values=cache, use_cache=True)
                cache.crop(-1)
            taking[attention] = True
        except Exception:  # if it is the model's own, transformers' loop shows it
            taking[attention] = False
    return taking[attention]


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


_lock = threading.Lock()
_reading: weakref.WeakKeyDictionary = (
    weakref.WeakKeyDictionary()
)  # model whose attention was changed -> calls under way


@contextmanager
def reading_pages(model):
    """`model` attends over pages, where it can and was given no other attention than the default one; and as before after the
    last of the calls that run at the same time."""
    with _lock:
        changes = model in _reading
        if not changes and model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
            try:
                model.set_attn_implementation(ATTENTION_NAMES[0])
                changes = True
            except ValueError:  # not one of those whose attention can be replaced
                pass
        if changes:
            _reading[model] = _reading.get(model, 0) + 1
    try:
        yield
    finally:
        with _lock:
            if changes:
                _reading[model] -= 1
                if not _reading[model]:
                    del _reading[model]
                    model.set_attn_implementation("sdpa")
