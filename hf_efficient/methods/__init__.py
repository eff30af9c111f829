"""Methods choose the numbers. One file a method, which the name in a config selects; it defines

quantize(weight [N, K] float, format) -> the canonical tensors of `format`, scales in the weight's dtype.
"""

import importlib


def get_method(name: str):
    """The module of the method `name` (see `hf_efficient.configs.available_methods`)."""
    return importlib.import_module(f"hf_efficient.methods.{name}")
