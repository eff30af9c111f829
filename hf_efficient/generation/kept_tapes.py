"""Recorded forwards that outlive a `generate()` call: with the cache that they read, for the next call of the same shape."""

import threading
import weakref
from typing import NamedTuple

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.prefix_key import ModelKey
from hf_efficient.generation.taped_forward import TapedForward


MOST_BYTES = 256 << 20  # a larger cache is not kept


class Kept(NamedTuple):
    """rows, tokens: what the cache was made for. key: `ModelKey.digest` and how the model attends, when it was made."""

    rows: int
    tokens: int
    key: tuple
    cache: PagedCache
    taped: TapedForward | None


_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> Kept
_lock = threading.Lock()


def take(model, rows: int, tokens: int | None, keeps_hidden: bool) -> Kept:
    """A cache with room for `rows` rows of `tokens` tokens, and what was recorded over it: another call's that has ended, if
    nothing about the model has changed, else new and empty. Until `give_back` nobody else is given it. Where nothing can be
    recorded, or `tokens` is None, it grows."""
    with _lock:
        kept = _kept.pop(model, None)
    cache = PagedCache(model.config)
    if tokens is None or model.device.type != "cpu" or not cache.reads_pages:
        return Kept(rows, 0, (), cache, None)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    key = ModelKey(model).digest, attention, keeps_hidden, torch.is_inference_mode_enabled()
    if kept is not None and (kept.rows, kept.key) == (rows, key) and kept.tokens >= tokens:
        kept.cache.rewind([0] * rows)
        return kept
    tokens = max(512, 1 << (tokens - 1).bit_length())
    cache = PagedCache(model.config, num_blocks=rows * -(-tokens // cache.block_size))
    for layer in cache.layers:
        layer.exact = False  # nobody else sees this cache: its pages are read where they lie, prompts too
    return Kept(rows, tokens, key, cache, None)


def give_back(model, kept: Kept, taped: TapedForward | None) -> None:
    """After a call that nobody holds the cache of."""
    if taped is None or len(kept.cache.cache_seqlens) != kept.rows or kept.cache.stats().bytes_allocated > MOST_BYTES:
        return
    taped.forward = None
    with _lock:
        _kept[model] = kept._replace(taped=taped)
