"""Experts that accelerate placed on a device (`device_map`): its hook is off while their weights move."""

from collections.abc import Iterable
from contextlib import ExitStack, contextmanager

from torch import nn


def hook_of(module: nn.Module):
    """accelerate's hook, which brings inputs to the device of `module`; None without one."""
    return getattr(module, "_hf_hook", None)


@contextmanager
def without_hooks(modules: Iterable[nn.Module]):
    """Inside, the hooks of `modules` are off. They come back over the class and the forward that a module has then, and
    move none of the weights that are offloaded then."""
    with ExitStack() as stack:
        for module in modules:
            if (hook := hook_of(module)) is not None:
                from accelerate.hooks import remove_hook_from_module

                remove_hook_from_module(module)
                if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
                    del module.forward  # accelerate leaves the forward of the class there
                stack.callback(_put_back, module, hook)
        yield


def _put_back(module: nn.Module, hook) -> None:
    from accelerate.hooks import add_hook_to_module

    kept = {name: module._parameters.pop(name) for name in getattr(module, "_offloaded_names", ())}
    try:
        add_hook_to_module(module, hook)  # moves what is a parameter now
    finally:
        module._parameters.update(kept)
