"""Routers of mixtures, which select the experts of a token: rounding them would select other experts."""

import re

from torch import nn


_NAMES = re.compile(r"Router|TopKGating|MoE\w*Gate$")  # of transformers' classes


def linears_of_routers(model: nn.Module) -> set[str]:
    """Names of the linear layers that belong to routers. Most routers hold a Parameter and no layer."""
    routers = [f"{name}." for name, module in model.named_modules() if _NAMES.search(type(module).__name__)]
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name for name in linears if name.startswith(tuple(routers))}
