"""The methods that a loaded compressed model has in the place of transformers': saving, pushing, and
`generate`."""

import os
import types
from contextlib import contextmanager
from pathlib import Path

from hf_efficient.embeddings import EfficientEmbedding, TiedEmbedding, TiedLinear
from hf_efficient.files import atomic_checkpoint
from hf_efficient.integrations.transformers_compat import attention_of
from hf_efficient.integrations.transformers_layers import keep_unfused
from hf_efficient.kernels.attention.api import ATTENTION_NAMES
from hf_efficient.layers import CompressedModule


def replace_methods(model) -> None:
    """Makes `model.save_pretrained` write atomically (with `push_to_hub=True` it stays transformers'),
    `model.push_to_hub` add a card, `model.generate` take our loop where that is faster, and, where the input or
    output embedding is compressed, `model.resize_token_embeddings` raise, and `model.set_input_embeddings` where
    others are tied to a compressed one. `train` keeps fused kernels from compressed weights."""
    keep_unfused(model)
    model.save_pretrained = types.MethodType(save_pretrained, model)
    model.push_to_hub = types.MethodType(push_to_hub, model)
    if _has_compressed_embedding(model) or isinstance(model.get_output_embeddings(), CompressedModule):
        model.resize_token_embeddings = types.MethodType(resize_token_embeddings, model)
    if any(isinstance(module, (TiedEmbedding, TiedLinear)) for module in model.modules()):
        model.set_input_embeddings = types.MethodType(set_input_embeddings, model)
    if model.can_generate():
        from hf_efficient.integrations.transformers_generation import enable_automatic

        enable_automatic(model)


def restore_methods(model) -> None:
    """Gives the model transformers' methods back."""
    for name in ("save_pretrained", "push_to_hub", "resize_token_embeddings", "set_input_embeddings"):
        model.__dict__.pop(name, None)
    if model.can_generate():
        from hf_efficient.integrations.transformers_generation import disable_automatic

        if attention_of(model.config) not in ATTENTION_NAMES:  # such models have the loop for their own sake
            disable_automatic(model)


@contextmanager
def writing(model):
    """Inside, `model` writes the text of its calibration with our loop where it can."""
    if not model.can_generate():
        yield
        return
    from hf_efficient.generation import model_state
    from hf_efficient.integrations.transformers_generation import disable_automatic, enable_automatic

    enable_automatic(model)
    try:
        yield
    finally:
        disable_automatic(model)
        model_state.forget(model)


def push_to_hub(self, repo_id, **options) -> str:
    """What `replace_methods` installs; see `hub.push_to_hub`."""
    from hf_efficient.integrations import hub

    return hub.push_to_hub(self, repo_id, **options)


def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
    """What `replace_methods` installs. Raises ValueError where there is something to resize."""
    if new_num_tokens is None and pad_to_multiple_of is None:
        return self.get_input_embeddings()
    which, option = ("input", "embeddings") if _has_compressed_embedding(self) else ("output", "quantize_lm_head")
    raise ValueError(
        f"resize_token_embeddings({new_num_tokens}): the {which} embedding is compressed ({option}=True): "
        "resize the model before it is compressed, or call dequantize() first"
    )


def set_input_embeddings(self, value):
    """What `replace_methods` installs. Raises ValueError: what is tied to the compressed embedding would keep it."""
    raise ValueError(
        f"set_input_embeddings({type(value).__name__}): other modules are tied to the input embedding, which is "
        "compressed (embeddings=True): replace it before the model is compressed, or call dequantize() first"
    )


def _has_compressed_embedding(model) -> bool:
    return any(isinstance(module, EfficientEmbedding) for module in model.modules())


def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
    """What `replace_methods` installs. Unpickling looks the bound method up by this name, and finds the class's own."""
    original = type(self).save_pretrained
    target = os.path.abspath(os.fspath(save_directory))
    with _saving(self, state_dict):
        if kwargs.get("push_to_hub") or not is_main_process or os.path.isfile(target):
            return original(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        with atomic_checkpoint(Path(target)) as new:
            original(self, str(new), is_main_process, state_dict, *args, **kwargs)


@contextmanager
def _saving(model, state_dict: dict | None):
    """Inside, `model` is saved with these tensors, if they are given: transformers asks the quantizer instead."""
    if state_dict is None:
        yield
        return
    quantizer = model.hf_quantizer
    quantizer.part_to_save = state_dict
    try:
        yield
    finally:
        quantizer.part_to_save = None
