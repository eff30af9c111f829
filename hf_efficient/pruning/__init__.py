"""Pruning chooses the zeros. One file a method, which the name in a config selects; it defines

NEEDS  what it must know of the inputs: () or names of `LinearInputs` attributes, for example ("hessian",)
GROUP  which weights compete unless the config says so: "row" or "layer" (optional, default "row"); see `Sparsity`
prune(weight [N, K] float, target: Sparsity, inputs: LinearInputs | None) -> (pruned weight [N, K] in the weight's dtype, mask
    bool [N, K], True = kept): zeros exactly where not kept

Files without `prune` are shared by methods or serve what comes before and after."""

import functools
import importlib
import pkgutil

import torch

from hf_efficient.pruning.mask import Sparsity


@functools.cache
def available_methods() -> list[str]:
    """Names of the methods that zero single weights."""
    files = [file.name for file in pkgutil.iter_modules(__path__) if not (file.ispkg or file.name.startswith("_"))]
    return sorted(name for name in files if hasattr(importlib.import_module(f"{__name__}.{name}"), "prune"))


def get_method(name: str):
    """The module of the method `name` (see `available_methods`)."""
    return importlib.import_module(f"{__name__}.{name}")


def prune(weight: torch.Tensor, method: str, target: Sparsity, inputs=None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] pruned by `method` -> (weight of the same dtype, mask bool [N, K], True = kept).

    Args:
        inputs: `LinearInputs` of the layer, for methods that need it.

    Raises:
        ValueError: the pattern does not divide K, the weight is not finite, or the method lacks what it needs.
    """
    module = get_method(method)
    if not weight.isfinite().all():
        raise ValueError(f"the weight has {(~weight.isfinite()).sum().item()} values that are NaN or infinite")
    if missing := [need for need in module.NEEDS if getattr(inputs, need, None) is None]:
        raise ValueError(f"method={method!r} needs {' and '.join(missing)} of the inputs: none is given")
    target.competitors(*weight.shape)
    return module.prune(weight, target, inputs)
