"""Watches modules while a model runs, or replaces what they compute; everything is undone afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def watching_inputs(modules: Mapping[Any, nn.Module], see: Callable[[Any, torch.Tensor], Any]) -> Iterator[None]:
    """Inside, `see(key, x)` is called before every call of a module, with its key in `modules` and its first
    argument."""

    def hook(key):
        def before(module, args):
            see(key, args[0])

        return before

    with ExitStack() as stack:
        for key, module in modules.items():
            stack.callback(module.register_forward_pre_hook(hook(key)).remove)
        yield


@contextmanager
def watching_outputs(modules: Mapping[Any, nn.Module], see: Callable[[Any, tuple, dict, Any], Any]) -> Iterator[None]:
    """Inside, `see(key, args, kwargs, output)` is called after every call of a module, with its key in `modules`. What
    `see` returns, unless that is None, takes the place of the output."""

    def hook(key):
        return lambda module, args, kwargs, output: see(key, args, kwargs, output)

    with ExitStack() as stack:
        for key, module in modules.items():
            stack.callback(module.register_forward_hook(hook(key), with_kwargs=True).remove)
        yield


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Afterwards each module of `models` is in training or evaluation mode as before, new ones as their model is."""
    before = [(model, [(module, module.training) for module in model.modules()]) for model in models]
    try:
        yield
    finally:
        for model, modules in before:
            model.train(modules[0][1])
            for module, was_training in modules:
                module.training = was_training


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is in evaluation mode and no parameter asks for a gradient. Afterwards all is as before."""
    before = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with modes_kept(model):
            model.eval()
            for parameter in before:
                parameter.requires_grad_(False)
            yield
    finally:
        for parameter in before:
            parameter.requires_grad_(True)


@contextmanager
def replaced_forwards(modules: Iterable[nn.Module], make: Callable[[int], Callable]) -> Iterator[None]:
    """Inside, the i-th module has `make(i)` as its forward; its attributes, hooks and class stay."""
    own = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        for index, (module, _) in enumerate(own):
            module.forward = make(index)
        yield
    finally:
        for module, forward in own:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
