"""The shape of a decoder in its config: reading it, shrinking it, and which size removes how many parameters."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn


_NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_STEPS = (8, 2, 1)  # kernels like widths that are multiples of 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """num_attention_heads is a multiple of num_key_value_heads; hidden_size does not change the width of a head."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    hidden_size: int

    def smaller(self, **target: int) -> "Shape":
        """This shape with some of its numbers replaced. Fewer attention heads without a word about key-value heads take
        whole groups where these can be as many fewer, else the same number from each group; and the other way round.

        Raises:
            ValueError: a name that is no field, a size that is not positive or larger than now, heads that are not shared
                evenly.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name, size in target.items():
            if name not in names:
                raise ValueError(f"shape has {name!r}: allowed are {names}")
            now = getattr(self, name)
            if type(size) is not int or not 0 < size <= now:
                raise ValueError(f"shape: {name}={size!r} is not supported: it must be an integer from 1 to {now}")
        share = self.num_attention_heads // self.num_key_value_heads
        if "num_attention_heads" in target and "num_key_value_heads" not in target:
            heads = target["num_attention_heads"]
            target["num_key_value_heads"] = heads // share if heads % share == 0 else self.num_key_value_heads
        elif "num_key_value_heads" in target and "num_attention_heads" not in target:
            target["num_attention_heads"] = target["num_key_value_heads"] * share
        new = dataclasses.replace(self, **target)
        if new.num_attention_heads % new.num_key_value_heads or (
            new.num_attention_heads // new.num_key_value_heads > share
        ):
            raise ValueError(
                f"shape: {new.num_attention_heads} attention heads cannot be cut evenly from {self.num_attention_heads} in "
                f"{self.num_key_value_heads} groups with {new.num_key_value_heads} key-value heads left: take whole groups "
                f"of {share}, or as many heads from each group"
            )
        return new


def shape_of(config, intermediate_size: int) -> Shape:
    """The shape that a text config describes; `intermediate_size` is that of the MLPs found in the model.

    Raises:
        ValueError: a config without these numbers, or with one number for each layer.
    """
    numbers = {
        name: getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    }
    numbers["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or numbers["num_attention_heads"]
    for name, value in numbers.items():
        if type(value) is not int:
            raise ValueError(f"{type(config).__name__} has {name}={value!r}: only layers of one shape can be pruned")
    return Shape(intermediate_size=intermediate_size, **numbers)


def smaller_config(config, old: Shape, new: Shape, layers: list[int], head_dim: int, untie: bool = False):
    """A config of the same class for the shape `new`, whose layers are `layers` of the old ones.

    Raises:
        ValueError: the class refuses, or has no name for a number that changes.
    """
    values = config.to_dict()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == old.num_hidden_layers:  # layer_types
            values[name] = [value[layer] for layer in layers]
    names = {"num_hidden_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads"}
    names |= {"num_key_value_heads": "num_key_value_heads", "hidden_size": "hidden_size"}
    names["intermediate_size"] = next((name for name in _NEURONS if hasattr(config, name)), "intermediate_size")
    for name, own in names.items():
        if getattr(old, name) != getattr(new, name):
            own = config.attribute_map.get(own, own)
            if own not in values:
                if name == "num_key_value_heads" and new.num_key_value_heads == new.num_attention_heads:
                    continue  # without groups
                raise ValueError(f"{type(config).__name__} has no {name}: it cannot become {getattr(new, name)}")
            values[own] = getattr(new, name)
    if (old.hidden_size, old.num_attention_heads) != (new.hidden_size, new.num_attention_heads):
        values["head_dim"] = head_dim
    if untie:
        values["tie_word_embeddings"] = False
    try:
        small = type(config).from_dict(values)
    except Exception as error:  # the classes raise errors of their own
        raise ValueError(f"{type(config).__name__} refuses {new}: {error}") from None
    small._attn_implementation = config._attn_implementation
    return small


def empty_model(kind: type, config) -> nn.Module:
    """A model of class `kind` on the meta device."""
    with torch.device("meta"):
        return kind._from_config(config)


def read_parameters(model: nn.Module) -> int:
    """Parameters that a token reads: all of them but an input embedding that is not the output head's, of which it reads a
    row."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = embedding.weight if head is None or head.weight is not embedding.weight else None
    return sum(parameter.numel() for parameter in model.parameters() if parameter is not looked_up)


def largest_size(count: Callable[[int], int | None], now: int, budget: float) -> int | None:
    """The largest size below `now` with `count(size)` parameters at most `budget`, a multiple of 8 where one is near; None
    where none is small enough. count: grows with the size; None for sizes that the config refuses."""
    low, high = 0, now  # the first is small enough
    while high - low > 1:
        middle = (low + high) // 2
        number = next((n for size in range(middle, low, -1) if (n := count(size)) is not None), None)
        low, high = (middle, high) if number is None or number <= budget else (low, middle)
    for step in _STEPS:
        for size in range(low // step * step, max(0, low - 16 if step > 1 else 0), -step):
            if (number := count(size)) is not None and number <= budget:
                return size
    return None
