"""Hooks that watch modules while a model runs, and are gone afterwards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def watching_inputs(modules: Mapping[Any, nn.Module], see: Callable[[Any, torch.Tensor], None]) -> Iterator[None]:
    """Inside, `see(key, x)` is called before every call of a module, with its key in `modules` and its first argument."""
    with ExitStack() as stack:
        for key, module in modules.items():
            hook = module.register_forward_pre_hook(lambda _, args, key=key: see(key, args[0]))
            stack.callback(hook.remove)
        yield


@contextmanager
def watching_outputs(modules: Mapping[Any, nn.Module], see: Callable[[Any, tuple, dict, Any], None]) -> Iterator[None]:
    """Inside, `see(key, args, kwargs, output)` is called after every call of a module, with its key in `modules`."""
    with ExitStack() as stack:
        for key, module in modules.items():
            hook = module.register_forward_hook(
                lambda _, args, kwargs, output, key=key: see(key, args, kwargs, output), with_kwargs=True
            )
            stack.callback(hook.remove)
        yield
