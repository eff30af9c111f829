"""Models that share their weights with another one and differ in some modules; the other one does not change."""

import functools
from collections.abc import Callable
from types import MethodType

from torch import nn


def view_of(module: nn.Module) -> nn.Module:
    """A module of the same class with the same tensors and children, whose attributes, parameters, buffers and children
    can be replaced without changing those of `module`."""
    view = object.__new__(type(module))
    attributes = dict(module.__dict__)
    forward = attributes.pop("forward", None)
    for name in ("_parameters", "_buffers", "_modules"):
        attributes[name] = dict(attributes[name])
    view.__dict__.update(attributes)
    if isinstance(forward, functools.partial) and module in forward.args:  # accelerate's hooks move what goes in
        own = tuple(view if argument is module else argument for argument in forward.args)
        view.__dict__["forward"] = functools.partial(forward.func, *own, **forward.keywords)
        view.__dict__["_old_forward"] = MethodType(type(view).forward, view)
    return view


def rebuilt(module: nn.Module, change: Callable[[str, nn.Module], nn.Module], name: str = "") -> nn.Module:
    """`module` with `change(name, submodule)` in place of each submodule, children first. Whatever holds a changed
    module is replaced by a view of it.

    change: returns its argument where nothing is to change, else another module or a `view_of` the argument; the
        argument may be a view already.
    """
    prefix = f"{name}." if name else ""
    before = {key: child for key, child in module._modules.items() if child is not None}
    after = {key: rebuilt(child, change, prefix + key) for key, child in before.items()}
    if any(after[key] is not child for key, child in before.items()):
        module = view_of(module)
        module._modules.update(after)
    return change(name, module)
