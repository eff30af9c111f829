"""What is remembered of a model between `generate()` calls, as long as nothing about the model changes."""

import threading
import weakref
from itertools import islice

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient.cache.over_pages import over_pages
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.model_snapshot import ModelSnapshot
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.replay.captured_forward import can_be_captured, is_watched
from hf_efficient.generation.stock_loop import exact_length, overrides_steps
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


_REGISTRIES = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


class ModelState:
    """Of a model as it is now.

    reads_pages: its attention takes keys and values from the pages of a `PagedCache`; runs_over_pages: so it does when its
    config says "sdpa", inside `over_pages`. is_capturable: its forwards of few tokens can be recorded, as far as is known
    before trying. exact_length: see `stock_loop`. kept: the recorded forwards that wait for the next call, the latest last.
    """

    def __init__(self, model):
        self.decoder = model.config.get_text_config(decoder=True)  # its config
        self.functions = _functions(self.decoder)
        self.runs_over_pages = _runs_over_pages(model)
        self.reads_pages = self.runs_over_pages or _attention(model) in ATTENTION_NAMES
        self.reads_pages = self.reads_pages and not is_watched(model) and _takes_pages(model, self.runs_over_pages)
        self.is_capturable = self.reads_pages and can_be_captured(model) and not overrides_steps(model)
        self.exact_length = exact_length(model)
        self.kept = []
        self.snapshot = ModelSnapshot(model)

    def holds(self, model) -> bool:
        """Whether nothing about `model` has changed. Of one whose weights are offloaded (accelerate makes new tensors at every
        forward, and nothing is recorded of it) only the attention is looked at."""
        if self.functions != _functions(self.decoder):
            return False
        if any(parameter.is_meta for parameter in islice(model.parameters(), 1)):
            return True
        return self.snapshot.holds()


_states: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> ModelState
_lock = threading.Lock()


def current(model) -> ModelState:
    """The same one until something about `model` changes: looks at all of it."""
    with _lock:
        state = _states.get(model)
    if state is None or not state.holds(model):
        state = ModelState(model)
        with _lock:
            _states[model] = state
    return state


def latest(model) -> ModelState:
    """The one that `current` gave last, without looking."""
    return _states[model]


def _attention(model) -> str:
    return model.config.get_text_config(decoder=True)._attn_implementation


def _functions(decoder) -> tuple:
    """What computes attention and masks over pages, by a decoder's config: ours in place of transformers' "sdpa", or what a user
    registered."""
    with over_pages():
        return tuple(registry.get(decoder._attn_implementation) for registry in _REGISTRIES)


def _runs_over_pages(model) -> bool:
    """Whether "sdpa" can be replaced: for text decoders that take flash attention, where it is transformers' own "sdpa"."""
    if _attention(model) != "sdpa" or model.config is not model.config.get_text_config(decoder=True):
        return False
    try:
        if not model._can_set_attn_implementation():
            return False
        model._check_and_adjust_attn_implementation(ATTENTION_NAMES[0], is_init_check=False)
    except ValueError:
        return False
    return _functions(model.config.get_text_config(decoder=True)) == tuple(
        registry[ATTENTION_NAMES[0]] for registry in _REGISTRIES
    )


def _takes_pages(model, instead_of_sdpa: bool) -> bool:
    """Whether the model hands its attention what its cache handed to it: of two tokens, run once."""
    try:
        RaggedModel.check(model, 1, "model")
        positions, cache = torch.arange(2, device=model.device)[None], PagedCache(model.config)
        windows = [state.window for state in cache.states]
        if instead_of_sdpa:
            cache.attend_over_pages()
        inputs = dict(input_ids=torch.zeros_like(positions), position_ids=positions, past_key_values=cache)
        with torch.no_grad(), cache.forward_context():
            model(**inputs, use_cache=True)
        cache.crop(-1)
        # the windows are those of the config, and none of its layers was left out
        is_as_configured = windows == [state.window for state in cache.states]
        return is_as_configured and all(layer.is_initialized for layer in cache._paged_layers)
    except Exception:  # if it is the model's own, transformers' loop shows it
        return False
