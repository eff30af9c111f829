"""Shapes of a decoder: read from its config, made smaller, written to a config, and their number of parameters."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from hf_efficient.integrations.transformers_compat import copy_attention, model_from_config


# what config classes call the number of neurons of an MLP
_INTERMEDIATE_SIZES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_STEPS = (8, 2, 1)  # sizes are multiples of the first that is near: kernels are fast at multiples of 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. num_attention_heads is a multiple of num_key_value_heads; the width of a head does not depend
    on hidden_size."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    hidden_size: int

    def smaller(self, **target: int) -> "Shape":
        """This shape with some sizes replaced.

        Where only one of num_attention_heads and num_key_value_heads is given, whole groups of query heads with the
        key-value head they share go. If attention heads do not fall into whole groups, each group loses as many of
        them.

        Raises:
            ValueError: a name that is no field, a size that is not positive or larger than now, heads that are not
                shared evenly.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name, size in target.items():
            if name not in names:
                raise ValueError(f"shape has {name!r}: allowed are {names}")
            now = getattr(self, name)
            if type(size) is not int or not 0 < size <= now:
                raise ValueError(f"shape: {name}={size!r} is not supported: it must be an integer from 1 to {now}")
        share = self.num_attention_heads // self.num_key_value_heads
        heads, kv_heads = target.get("num_attention_heads"), target.get("num_key_value_heads")
        if heads and not kv_heads:
            target["num_key_value_heads"] = heads // share if heads % share == 0 else self.num_key_value_heads
        elif kv_heads and not heads:
            target["num_attention_heads"] = kv_heads * share
        new = dataclasses.replace(self, **target)
        heads, kv_heads = new.num_attention_heads, new.num_key_value_heads
        if heads % kv_heads or heads // kv_heads > share:
            raise ValueError(
                f"shape: {heads} attention heads cannot be cut evenly from {self.num_attention_heads} in "
                f"{self.num_key_value_heads} groups with {kv_heads} key-value heads left: take whole groups of "
                f"{share}, or as many heads from each group"
            )
        return new


def shape_of(config, intermediate_size: int) -> Shape:
    """The shape that a text config describes; intermediate_size: of the MLPs found in the model.

    Raises:
        ValueError: a config without these sizes, or with one size for each layer.
    """
    sizes = {name: getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or sizes["num_attention_heads"]
    for name, value in sizes.items():
        if type(value) is not int:
            raise ValueError(f"{type(config).__name__} has {name}={value!r}: only layers of one shape can be pruned")
    return Shape(intermediate_size=intermediate_size, **sizes)


def smaller_config(config, old: Shape, new: Shape, layers: list[int], head_dim: int, untie: bool = False):
    """A config of the class of `config`, a model of shape `old`, for the shape `new`.

    layers: indices of the old layers that the new ones are. untie: whether the output embedding gets weights of its
    own.

    Raises ValueError: the class refuses, or has no name for a size that changes.
    """
    values = config.to_dict()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == old.num_hidden_layers:  # one value a layer, as layer_types
            values[name] = [value[layer] for layer in layers]
    for field in dataclasses.fields(Shape):
        name, size = field.name, getattr(new, field.name)
        if getattr(old, name) == size:
            continue
        key = name
        if name == "intermediate_size":
            key = next((key for key in _INTERMEDIATE_SIZES if hasattr(config, key)), name)
        key = config.attribute_map.get(key, key)
        if key in values:
            values[key] = size
        elif name != "num_key_value_heads" or size != new.num_attention_heads:  # as many: a class without groups
            raise ValueError(f"{type(config).__name__} has no {name}: it cannot become {size}")
    if (old.hidden_size, old.num_attention_heads) != (new.hidden_size, new.num_attention_heads):
        values["head_dim"] = head_dim
    if untie:
        values["tie_word_embeddings"] = False
    try:
        small = type(config).from_dict(values)
    except Exception as error:  # config classes raise errors of their own types
        raise ValueError(f"{type(config).__name__} refuses {new}: {error}") from None
    copy_attention(config, small)
    return small


def empty_model(kind: type, config) -> nn.Module:
    """A model of class `kind` on the meta device."""
    with torch.device("meta"):
        return model_from_config(kind, config)


def read_parameters(model: nn.Module) -> int:
    """Number of parameters that a token reads: all of them, except an input embedding that is not tied to the output
    embedding, of which it reads one row."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = embedding.weight if head is None or head.weight is not embedding.weight else None
    return sum(parameter.numel() for parameter in model.parameters() if parameter is not looked_up)


def largest_size(count: Callable[[int], int | None], now: int, budget: float) -> int | None:
    """The largest size below `now` with at most `budget` parameters, a multiple of 8 where one is near; None where no
    size is small enough.

    count: size -> number of parameters, which grows with the size; None for sizes that the config refuses."""
    low, high = 0, now  # `low` is small enough, `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        number = next((n for size in range(middle, low, -1) if (n := count(size)) is not None), None)
        low, high = (middle, high) if number is None or number <= budget else (low, middle)
    for step in _STEPS:
        for size in range(low // step * step, max(0, low - 16 if step > 1 else 0), -step):
            if (number := count(size)) is not None and number <= budget:
                return size
    return None
