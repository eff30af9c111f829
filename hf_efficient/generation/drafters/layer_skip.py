"""A model without some of its layers, on the same weights.

Zhang et al. 2023, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding"; Elhoushi
et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding"; Xia et al. 2024, "SWIFT".
"""

import copy
import re

from torch import nn

from hf_efficient.generation.drafters.weight_sharing import rebuilt, view_of
from hf_efficient.generation.model_traits import decoder_layers


def skippable_layers(model) -> tuple[str, nn.ModuleList]:
    """`decoder_layers` of a model whose layers can be left out. Raises ValueError where layers read the keys and values
    of others, or have configs of their own."""
    found, config = decoder_layers(model), model.config.get_text_config(decoder=True)
    shares = getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None)
    if shares or getattr(config, "is_heterogeneous", False):
        reason = "share keys and values" if shares else "have configs of their own"
        raise ValueError(f"model={type(model).__name__}: its layers {reason}, so none of them can be left out")
    return found


def with_layers(model, kept: list[int]):
    """A view of `model` with only the layers `kept` (ascending indices). They are numbered anew, so that a cache made
    for its config holds just these. All tensors are those of `model`, which does not change."""
    path, layers = skippable_layers(model)
    text = model.config.get_text_config(decoder=True)
    configs = {id(text): _config_with_layers(text, kept)}
    if model.config is not text:
        outer = configs[id(model.config)] = copy.copy(model.config)
        nested = [name for name in model.config.sub_configs if getattr(model.config, name, None) is text]
        if len(nested) != 1:
            raise ValueError(f"model={type(model).__name__}: the config of its decoder is not a part of its own config")
        setattr(outer, nested[0], configs[id(text)])
    new_index = {f"{path}.{old}": new for new, old in enumerate(kept)}
    inside = re.compile(rf"({re.escape(path)}\.\d+)(?:\.|$)")

    def change(name: str, module: nn.Module) -> nn.Module:
        layer, changes = inside.match(name), {}
        numbered = layer is not None and layer[1] in new_index and "layer_idx" in module.__dict__
        if numbered:
            changes["layer_idx"] = new_index[layer[1]]
        if (numbered or layer is None) and id(module.__dict__.get("config")) in configs:
            changes["config"] = configs[id(module.config)]
        if changes:
            module = view_of(module)
            module.__dict__.update(changes)
        if name == path:
            return nn.ModuleList(module[index] for index in kept).train(module.training)
        return module

    return rebuilt(model, change)


def _config_with_layers(config, kept: list[int]):
    """A copy of `config` for the layers `kept`; what it lists layer by layer is cut to match."""
    new, count = copy.copy(config), config.num_hidden_layers
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == count:
            setattr(new, name, [value[index] for index in kept])
    new.num_hidden_layers = len(kept)
    return new
