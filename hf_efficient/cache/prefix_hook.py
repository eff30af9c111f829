"""The forward hooks by which a `PrefixCache` reads and shortens forwards, and the rules for what it may shorten."""

import weakref

import torch

from hf_efficient.integrations.transformers_compat import cache_names


_INPUTS = {"input_ids", "attention_mask", "position_ids", "cache_position", *cache_names()}
_OUTPUTS = {"labels", "output_attentions", "output_hidden_states", "output_router_logits"}  # need every column
_REST = {"logits_to_keep", "use_cache", "return_dict"}


class ForwardHook:
    """A hook of the model's forward that calls `method(prefix, model, cache, inputs, *output)` when the forward uses a
    cache of the `PrefixCache` `prefix`. It holds `prefix` by a weak reference, and does nothing in a copied or pickled
    model.

    names: the parameters of the model's forward.
    """

    def __init__(self, prefix, names: list[str], method):
        self._prefix = None if prefix is None else weakref.ref(prefix)
        self._names, self._method = names, method

    def __reduce__(self):
        return ForwardHook, (None, self._names, self._method)

    def __call__(self, model, args, kwargs, *output):
        if torch.compiler.is_compiling() or self._prefix is None:
            return None
        inputs = {**dict(zip(self._names, args)), **kwargs}
        cache = next((inputs[name] for name in cache_names() if inputs.get(name) is not None), None)
        prefix = getattr(cache, "prefix_cache", None)
        if prefix is None or prefix is not self._prefix():
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        with torch.no_grad():
            rest = self._method(prefix, model, cache, inputs, *output)
        return None if rest is None else ((), rest)


def is_plain(inputs: dict, columns: int) -> bool:
    """True when keys and values follow from token ids, a 2-D mask and positions."""
    ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    others = inputs.keys() - _INPUTS - _OUTPUTS - _REST
    return (
        isinstance(ids, torch.Tensor)
        and ids.dim() == 2
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (len(ids), columns + ids.shape[1])))
        and (positions is None or (isinstance(positions, torch.Tensor) and positions.dim() >= 2))
        and all(inputs[name] is None or inputs[name] is False for name in others)
    )


def columns_to_skip(model, inputs: dict) -> int:
    """How many leading columns the caller wants nothing of but their keys and values."""
    kept = inputs.get("logits_to_keep", 0)
    every = any(inputs.get(name) is not None and inputs[name] is not False for name in _OUTPUTS)
    every = every or any(getattr(model.config, name, False) for name in _OUTPUTS)
    if every or not isinstance(kept, int) or kept < 1:
        return 0
    return inputs["input_ids"].shape[1] - kept
