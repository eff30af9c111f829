"""The shape of the smaller model: what its class allows, and which shape is small enough."""

from collections.abc import Callable

from hf_efficient.compression.structured_pruning.anatomy import Anatomy
from hf_efficient.compression.structured_pruning.cutting import check_shapes
from hf_efficient.pruning.structured.groups import Groups
from hf_efficient.pruning.structured.shapes import Shape, empty_model, largest_size, read_parameters, smaller_config


def units_of(groups: Groups, shape: Shape) -> tuple[int, int]:
    """(groups, units of each) that a model of `shape` has: key-value heads and the query heads that share one, or
    neurons."""
    if groups.is_heads:
        return shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
    return shape.intermediate_size, 1


class ShapeSearch:
    """Smaller shapes of the model of `anatomy`.

    Args:
        method: see `prune_structure`.
        axes: key of a parameter -> its axes along the residual stream (see `Anatomy.hidden_axes`); {} where it stays.
    """

    def __init__(self, anatomy: Anatomy, method: str, axes: dict[str, tuple[int, ...]]):
        self.anatomy, self.method, self.model, self.old, self.axes = anatomy, method, anatomy.model, anatomy.shape, axes

    def config(self, new: Shape, layers: list[int] | None = None):
        """The config of a model of shape `new` with these layers of the old one, by default the first ones."""
        is_tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        layers = list(range(new.num_hidden_layers)) if layers is None else layers
        untie = is_tied and self.method == "slicegpt"
        return smaller_config(self.model.config, self.old, new, layers, self.anatomy.head_dim, untie)

    def check(self, new: Shape) -> None:
        """Raises ValueError where the class of the model cannot have the shape `new`."""
        small = empty_model(type(self.model), self.config(new))
        kept = {reader: groups.first(*units_of(groups, new)) for reader, groups in self.anatomy.groups.items()}
        check_shapes(self.anatomy, small, kept, self.axes, new.hidden_size)

    def without(self, remove: float, loss: Callable[[Shape], float]) -> Shape:
        """The shape with at most (1 - remove) of the parameters that a token reads.

        slicegpt lowers the hidden size and l1 the number of neurons; llm_pruner tries every number of key-value heads,
        each with as many neurons as the budget leaves, and takes the shape of the least `loss`.

        Raises:
            ValueError: no shape is small enough, or slicegpt would make the model larger, because it unties embeddings.
        """
        if not remove:
            return self.old
        budget, found = (1 - remove) * self._count(self.old), []
        name = "hidden_size" if self.method == "slicegpt" else "intermediate_size"
        for heads in range(self.old.num_key_value_heads, 0, -1) if self.method == "llm_pruner" else [None]:
            try:
                base = self.old if heads is None else self.old.smaller(num_key_value_heads=heads)
                self.check(base)
            except ValueError:
                break  # the class has no such heads
            count, size = self._count_by_size(base, name), getattr(self.old, name)
            size = size if count(size) <= budget else largest_size(count, size, budget)
            if size is not None:
                found.append(base.smaller(**{name: size}))
        if not found:
            kind = type(self.model).__name__
            raise ValueError(f"remove={remove!r} is more than method={self.method!r} can take from {kind}")
        new = min(found, key=loss) if len(found) > 1 else found[0]
        before, after = self.model.num_parameters(), empty_model(type(self.model), self.config(new)).num_parameters()
        if after >= before:
            raise ValueError(
                f"remove={remove!r} with method='slicegpt' makes {type(self.model).__name__} larger, {after:,} "
                f"parameters instead of {before:,}, because its tied output embedding gets weights of its own: remove "
                "more, or take method='llm_pruner'"
            )
        return new

    def _count(self, new: Shape) -> int | None:
        """Parameters that a token reads, see `read_parameters`; None for a shape that the config refuses."""
        try:
            return read_parameters(empty_model(type(self.model), self.config(new)))
        except ValueError:
            return None

    def _count_by_size(self, base: Shape, name: str) -> Callable[[int], int | None]:
        if name == "hidden_size":
            return lambda size: self._count(base.smaller(hidden_size=size))
        small = (self.config(base.smaller(intermediate_size=size)) for size in (1, 2))  # raises where there is no name
        one, two = (read_parameters(empty_model(type(self.model), config)) for config in small)
        return lambda size: one + (size - 1) * (two - one)  # linear in the neurons
