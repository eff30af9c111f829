"""What the tests of caches share."""

import functools

import torch
from helpers import tiny_model

from hf_efficient.cache.stores import grouped


FORMATS = ("int8", "fp8", "int4", "int2")
ROUTES = ("flash_paged", "sdpa")


@torch.no_grad()
def step(model, cache, tokens, **kwargs):
    """The logits of one forward over `cache`."""
    return model(tokens, past_key_values=cache, **kwargs).logits


def small_window(monkeypatch):
    """Sequences quantize after a few tokens."""
    monkeypatch.setattr(grouped, "WINDOW", 8)


@functools.cache
def llama(layers: int = 2):
    return tiny_model("llama", num_hidden_layers=layers)
