"""Formats, routes and a model for the tests of quantized pages."""

import functools

from helpers import tiny_model

from hf_efficient.cache.stores import grouped


FORMATS = ("int8", "fp8", "int4", "int2")
ROUTES = ("flash_paged", "sdpa")


def small_window(monkeypatch):
    """Rows quantize after a few tokens."""
    monkeypatch.setattr(grouped, "WINDOW", 8)


@functools.cache
def llama(layers: int = 2):
    return tiny_model("llama", num_hidden_layers=layers)
