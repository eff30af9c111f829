"""A model in training as it would be after training, to write text with."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from hf_efficient.compression.recovery.coded_experts import CodedExperts
from hf_efficient.compression.recovery.coded_linear import CodedLinear
from hf_efficient.compression.recovery.learned_norm import LearnedNorm
from hf_efficient.compression.recovery.masked_linear import MaskedLinear


def trained_linears(model) -> dict[str, nn.Module]:
    """name -> layer that is being trained."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (MaskedLinear, CodedLinear))}


def trained_modules(model) -> dict[str, nn.Module]:
    """name -> module that is being trained: `trained_linears`, with `CodedExperts` for theirs, and norms."""
    others = {name: each for name, each in model.named_modules() if isinstance(each, (CodedExperts, LearnedNorm))}
    inside = tuple(f"{name}." for name in others)
    layers = {name: module for name, module in trained_linears(model).items() if not name.startswith(inside)}
    return {**layers, **others}


def put(model, modules: Mapping[str, nn.Module]) -> None:
    """Puts each of `modules` in the place of the module of its name, under all names that this one has."""
    places = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    for names, module in [(places[id(model.get_submodule(name))], module) for name, module in modules.items()]:
        for name in names:
            model.set_submodule(name, module)


@contextmanager
def serving(model) -> Iterator[nn.Module]:
    """Inside, the layers of `model` that are trained are packed copies, so that it decodes as fast as it will after
    training. The copies take the memory of the packed model."""
    trained, was_training = trained_modules(model), model.training
    with torch.no_grad():
        packed = {name: _copy(module) for name, module in trained.items()}
    try:
        put(model, packed)
        yield model.eval()
    finally:
        put(model, trained)
        model.train(was_training)


def _copy(module: nn.Module) -> nn.Module:
    """What `module` would be packed into, without a change of the layer that it came from."""
    origin = module._origin
    module._origin = (copy.deepcopy(origin[0]),)
    try:
        return module.packed()
    finally:
        module._origin = origin
