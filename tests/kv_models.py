"""What the tests of caches share."""

import functools

import torch
from helpers import tiny_model

from hf_efficient.cache.page_handle import PAGES
from hf_efficient.cache.stores import grouped


FORMATS = ("int8", "fp8", "int4", "int2")
ROUTES = ("flash_paged", "sdpa")


@torch.no_grad()
def step(model, cache, tokens, **kwargs):
    """The logits of one forward over `cache`."""
    return model(tokens, past_key_values=cache, **kwargs).logits


def attend(cache, query, key, value):
    """Through layer 0 as a model does it: query [B, Hq, S, D], key and value [B, Hk, S, D] -> [B, S, Hq, D]."""
    marked, _ = cache.update(key, value, 0)
    return getattr(marked, PAGES).attend(
        query, key, value, None, softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0, s_aux=None
    )


def small_window(monkeypatch):
    """Sequences quantize after a few tokens."""
    monkeypatch.setattr(grouped, "WINDOW", 8)


@functools.cache
def llama(layers: int = 2):
    return tiny_model("llama", num_hidden_layers=layers)
