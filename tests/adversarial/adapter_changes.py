"""What users of PEFT do to a model between two calls. Importing this adds it to `changes.CHANGES`."""

import torch
from changes import CHANGES, change
from torch import nn


__all__ = ["CHANGES"]


@change
def add_an_adapter(model, number):
    import peft

    if _adapted(model):
        return
    torch.manual_seed(number)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "head" not in name]
    if linears:
        config = peft.LoraConfig(r=4, target_modules=linears[: 2 + number], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)


def _adapted(model) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "enable_adapters") and hasattr(module, "scaling")]


@change
def switch_adapters(model, number):
    for layer in _adapted(model):
        layer.enable_adapters(bool(number % 2))


@change
def scale_adapters(model, number):
    for layer in _adapted(model):
        layer.scaling["default"] *= 0.5 + number % 3


@change
def merge_adapters(model, number):
    for layer in _adapted(model):
        if layer.merged and number % 2:
            layer.unmerge()
        elif not layer.merged:
            layer.merge()
