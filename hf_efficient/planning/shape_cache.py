"""Caches without numbers: what a forward on the meta device is given, and the bytes of the cache that it returns."""

import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionLayer

from hf_efficient.cache.layer_groups import HybridLayer
from hf_efficient.cache.recurrent_layer import RecurrentLayer
from hf_efficient.planning.model_trace import current_trace


class ShapeCache(Cache):
    """A cache that says it holds the tokens that `hold` was told, stores none, and records the shapes of new keys and
    values. Recurrent layers store their states. paged: of the same model."""

    def __init__(self, paged: Cache):
        super().__init__(layers=[_layer_like(layer, index) for index, layer in enumerate(paged.layers)])

    def hold(self, tokens: int) -> None:
        for layer in self.layers:
            layer.context = tokens


def _layer_like(layer, index: int):
    if isinstance(layer, HybridLayer):
        return _HybridShapeLayer(index, layer.recurrent.number_of_states)
    return RecurrentLayer(layer.number_of_states) if isinstance(layer, RecurrentLayer) else _ShapeLayer(index)


class _ShapeLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, index: int):
        super().__init__()
        self.context, self.index = 0, index

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        heads, key_dim = key_states.shape[1], key_states.shape[3]
        current_trace().keys[self.index] = heads, key_dim, value_states.shape[3]
        return key_states, value_states

    def get_mask_sizes(self, query_length):
        return self.context + query_length, 0

    def get_seq_length(self):
        return self.context

    def get_max_length(self):
        return -1


class _HybridShapeLayer(LinearAttentionLayer, _ShapeLayer):
    """A state beside keys and values."""

    def __init__(self, index: int, number_of_states: int):
        _ShapeLayer.__init__(self, index)
        LinearAttentionLayer.__init__(self, number_of_states)


def cache_bytes(cache, more_tokens: float) -> float:
    """Bytes of a cache of transformers after `more_tokens` are appended to what it holds.

    States of fixed size, and keys and values of an encoder's output, do not grow.
    """
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache, more_tokens) + cache_bytes(cache.cross_attention_cache, 0)
    total = 0.0
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        growing = {id(getattr(layer, name, None)) for name in ("keys", "values")}
        for tensor in tree_leaves(vars(layer)):
            if not isinstance(tensor, torch.Tensor):
                continue
            length = tensor.shape[2] if id(tensor) in growing else 0
            if length:
                longer = length + more_tokens if window is None else min(length + more_tokens, max(window - 1, 1))
                total += tensor.nbytes * longer / length
            else:
                total += tensor.nbytes
    return total
