"""Pruning methods: each chooses the zeros of one weight. One file a method (a paper); the name in a config selects it.
Files without `prune` are shared by methods; `structured` and `contextual` are other kinds of pruning.

A method is a module with these attributes:

    NEEDS: tuple of names of `LinearInputs` attributes that it cannot do without, for example ("hessian",). () for a
        data-free method.
    GROUP (optional, default "row"): which weights compete unless the config says so, "row" or "layer"; see `Sparsity`.

    prune(weight, target, inputs=None) -> (pruned weight, mask)

        weight: float16, bfloat16 or float32 [N, K] (out_features, in_features), finite; not changed.
        target: `Sparsity`, whose pattern divides K.
        inputs: `LinearInputs` of the layer with everything in NEEDS, or None.
        Returns the weight [N, K] in its dtype with zeros where it is pruned, and the mask bool [N, K], True = kept."""

import functools
import importlib
import pkgutil

import torch

from hf_efficient.methods._units import in_units
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
        ValueError: the pattern does not divide K, the weight is not finite, the method lacks what it needs, or weights
            that make up for others are beyond the range of the dtype.
    """
    module = get_method(method)
    if not weight.isfinite().all():
        raise ValueError(f"the weight has {(~weight.isfinite()).sum().item()} values that are NaN or infinite")
    if missing := [need for need in module.NEEDS if getattr(inputs, need, None) is None]:
        raise ValueError(f"method={method!r} needs {' and '.join(missing)} of the inputs: none is given")
    target.competitors(*weight.shape)
    scaled, unit = in_units(weight)
    pruned, mask = module.prune(scaled, target, inputs)
    pruned = pruned if unit == 1 else pruned * unit
    if not pruned.isfinite().all():
        raise ValueError(
            f"method={method!r}: weights that make up for others are beyond the range of {weight.dtype}: load the "
            "model in bfloat16 or float32, or take method='wanda'"
        )
    return pruned, mask
