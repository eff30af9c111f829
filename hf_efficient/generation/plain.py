"""Token by token on a CPU: what `generate()` runs for models whose forwards can be recorded."""

import threading
import weakref
from contextlib import contextmanager

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.sequences import STATEFUL
from hf_efficient.generation.taped_forward import TapedForward
from hf_efficient.kernels.attention import ATTENTION_NAMES


def serves(model, input_ids, logits_processor, generation_config, synced_gpus, streamer, model_kwargs) -> bool:
    """Whether `generate()` is asked for nothing but tokens that this package's loop gives as well, only faster."""
    cache = model_kwargs.get("past_key_values")
    if (
        synced_gpus
        or generation_config.return_dict_in_generate
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
        return TapedForward.serves(model, PagedCache(model.config, num_blocks=1))


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
