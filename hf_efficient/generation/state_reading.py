"""The `RaggedModel` for models in which some layers (Jamba, LFM2, Qwen3-Next, Falcon-H1, Bamba) or all (Mamba) have a
recurrent state.

A state cannot be rewound. So these layers read the tokens of a forward one by one and store their state before each.
Their projections, and all other layers, read the tokens at once.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident

import torch
from torch import nn

from hf_efficient.cache.layer_groups import HYBRID, RECURRENT
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.recurrent_layer import RecurrentLayer
from hf_efficient.cache.state_cache import StateCache
from hf_efficient.generation.model_traits import mixers_of
from hf_efficient.generation.state_projections import Projections
from hf_efficient.integrations.transformers_loop import prefill
from hf_efficient.integrations.transformers_releases import states_name


class StateReading:
    """Methods that come before those of `RaggedModel`."""

    def _run(self, tokens, positions, mask, columns, tree, keep: int) -> torch.Tensor:
        inputs = dict(input_ids=tokens, attention_mask=mask, position_ids=positions, **self.extra, **self._cached)
        if self.limits_logits:
            inputs["logits_to_keep"] = keep
        with token_by_token(self.model, self.cache):
            return self.model(**inputs, return_dict=True).logits

    def _mask(self, columns: list[int], width: int, device, tree):
        """As `RaggedModel._mask`. No new token is padding, so layers with a state need no mask."""
        mask = super()._mask(columns, width, device, tree)
        if isinstance(mask, dict):
            mask |= dict.fromkeys(RECURRENT)
            mask.setdefault("full_attention", mask.get(HYBRID))
        return mask


class StatesAlone(StateReading):
    """For models of which all layers have a state: they are given no positions and call the cache by another name."""

    cache: StateCache

    def prefill(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> torch.Tensor:
        """As `RaggedModel.prefill`."""
        self.extra, self.mask, self.captured = {}, None, None
        self._cached = {states_name(): self.cache, "use_cache": True}
        with self._collecting_hidden():
            logits = prefill(self.model, input_ids, generation_config, {**model_kwargs, **self._cached}).logits[:, -1]
        self.cache.see(*input_ids.shape)
        self.prompt = list(self.cache.cache_seqlens)
        self.position = torch.zeros(len(input_ids), 1, dtype=torch.int64, device=self.model.device)
        return logits

    def _mask(self, columns: list[int], width: int, device, tree) -> None:
        return None

    def _run(self, tokens, positions, mask, columns, tree, keep: int) -> torch.Tensor:
        with token_by_token(self.model, self.cache):
            logits = self.model(input_ids=tokens, **self._cached, logits_to_keep=keep, return_dict=True).logits
        self.cache.see(*tokens.shape)
        return logits


@contextmanager
def token_by_token(model, cache: PagedCache | StateCache) -> Iterator[None]:
    """Inside, in a forward of `model` on this thread the layers with a state read one token after the other, and note
    their state in `cache` before each of them."""
    thread, whole = get_ident(), {}

    def before(layer: RecurrentLayer, together: Projections, module, args, kwargs):
        if get_ident() != thread:
            return None
        kwargs = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs
        hidden = whole[layer] = args[0] if args else kwargs["hidden_states"]
        layer.forget_notes()
        layer.note()
        together.begin(hidden)
        return _with(args, kwargs, hidden[:, :1])

    def after(layer: RecurrentLayer, together: Projections, module, args, kwargs, output):
        if get_ident() != thread:
            return None
        hidden, outputs = whole.pop(layer), [output]
        for token in hidden.split(1, 1)[1:]:
            layer.note()
            together.column += 1
            args, kwargs = _with(args, kwargs, token)
            outputs.append(module.forward(*args, **kwargs))
        return together.end(outputs)

    with ExitStack() as hooks:
        for layer, mixer in mixers(model, cache):
            together = Projections(mixer)
            hooks.enter_context(mixer.register_forward_pre_hook(partial(before, layer, together), with_kwargs=True))
            hooks.enter_context(mixer.register_forward_hook(partial(after, layer, together), with_kwargs=True))
            for hook in together.hooks(thread):
                hooks.enter_context(hook)
        yield
    if isinstance(cache, PagedCache):
        cache.noted_forward = cache.state.num_forwards


def mixers(model, cache: PagedCache | StateCache) -> list[tuple[RecurrentLayer, nn.Module]]:
    """The modules that read and write the states in `cache`: those with a convolution, by the number of their layer."""
    layers = [(cache.layers[module.layer_idx], module) for module in mixers_of(model)]
    return [(getattr(layer, "recurrent", layer), module) for layer, module in layers]


def _with(args: tuple, kwargs: dict, hidden: torch.Tensor) -> tuple[tuple, dict]:
    """The arguments of a layer with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
