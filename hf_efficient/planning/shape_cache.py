"""Caches without numbers: what a forward on the meta device is given, and the bytes of the cache that it returns."""

import torch
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from hf_efficient.planning.model_trace import current_trace


class ShapeCache(Cache):
    """A cache that says it holds `context` tokens, stores none, and records the shapes of new keys and values."""

    def __init__(self, context: int, layers: int):
        super().__init__(layers=[_ShapeLayer(context, index) for index in range(layers)])


class _ShapeLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, context: int, index: int):
        super().__init__()
        self.context, self.index = context, index

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
