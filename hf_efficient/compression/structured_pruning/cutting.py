"""Builds the smaller model: an ordinary one of the same class, filled block by block with what is kept of the dense one."""

import torch
from torch import nn
from transformers import initialization

from hf_efficient.compression.structured_pruning.anatomy import Anatomy, input_axis, norms_before
from hf_efficient.pruning.structured.basis import Basis, rms_gain


def cut_units(anatomy: Anatomy, name: str, value: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """The parameter `name` of a block without the units that go. kept: reader -> bool [G, R]."""
    linear = name.rpartition(".")[0]
    if linear not in anatomy.linears:
        return value
    inputs = input_axis(anatomy.chain.modules[0].get_submodule(linear))
    output = 1 - inputs if value.ndim == 2 else 0
    rows = torch.ones(value.shape[output], dtype=torch.bool)
    for reader, stay in kept.items():
        rows &= anatomy.groups[reader].kept_rows(stay, linear, len(rows))
        if reader == linear and value.ndim == 2:
            value = value.index_select(inputs, anatomy.groups[reader].kept_columns(stay).to(value.device))
    return value.index_select(output, rows.nonzero().flatten().to(value.device))


def check_shapes(anatomy: Anatomy, small: nn.Module, kept: dict[str, torch.Tensor], axes: dict, hidden: int) -> None:
    """small: the smaller model, on the meta device; kept: of a block; axes: of the residual stream, which becomes `hidden` wide.

    Raises:
        ValueError: where its class makes something else of its config than what is left of the dense model.
    """
    block = anatomy.chain.names[0] + "."
    for name, parameter in small.named_parameters():
        if anatomy.key(name) != name and not name.startswith(block):
            continue
        value = anatomy.model.get_parameter(name).data.to("meta")
        value = cut_units(anatomy, name.removeprefix(block), value, kept) if name.startswith(block) else value
        sizes = [hidden if axis in axes.get(anatomy.key(name), ()) else size for axis, size in enumerate(value.shape)]
        if sizes != list(parameter.shape):
            raise ValueError(
                f"{type(small).__name__} cannot have this shape: of {name} {sizes} would be left, but its config "
                f"({type(small.config).__name__}) makes it {list(parameter.shape)}"
            )


class Cutter:
    """Fills the smaller model, `small`; its blocks are `blocks`.

    Args:
        config: of the smaller model.
        layers: the layers that stay, ascending.
        basis: of the residual stream; None where it stays as it is.
        axes: of `Anatomy.hidden_axes`; needed for a basis.

    Raises:
        ValueError: norms that a rotation cannot pass.
    """

    def __init__(self, anatomy: Anatomy, config, layers: list[int], basis: Basis | None = None, axes=None):
        self.anatomy, self.layers, self.model = anatomy, layers, anatomy.model
        self.basis, self.axes = basis, axes or {}
        self.norm_of = norms_before(anatomy, axes) if basis is not None and basis.rotates else {}
        with initialization.no_init_weights():
            small = type(self.model)._from_config(config, dtype=self.model.dtype)
        small.tie_weights()  # left out with the initial weights
        self.small = small.to(self.model.device).eval().requires_grad_(False)
        if self.model.generation_config is not None:
            self.small.generation_config = self.model.generation_config
        self.prefix = anatomy.chain.names[0].rpartition(".")[0] + "."
        self.blocks = list(self.small.get_submodule(self.prefix[:-1]))

    def fill_around(self) -> None:
        """Everything outside the blocks."""
        for name, parameter in self.small.named_parameters():
            if not name.startswith(self.prefix):
                self._put(parameter, name, self.model.get_parameter(name).data, self.anatomy.chain.modules[0])

    def fill_block(self, position: int, kept: dict[str, torch.Tensor]) -> None:
        """Block `position` of the smaller model, from its layer of the dense one. kept: reader -> bool [G, R]."""
        dense = self.anatomy.chain.modules[self.layers[position]]
        for name, parameter in self.blocks[position].named_parameters():
            value = cut_units(self.anatomy, name, dense.get_parameter(name).data, kept)
            self._put(parameter, f"*.{name}", value, dense)

    def _put(self, parameter: nn.Parameter, key: str, value: torch.Tensor, dense: nn.Module) -> None:
        """dense: the block that `key` is meant in."""
        owner, axes = key.rpartition(".")[0], self.axes.get(key, ()) if self.basis is not None else ()
        module = self.anatomy.module(owner, dense)
        if axes and value.ndim == 1 and (gain := rms_gain(module)) is not None:
            offset = (gain - value.float()).mean().round()  # of (1 + weight)
            gain = torch.ones(parameter.shape) if self.basis.rotates else self.basis.cut(gain, 0) * self.basis.scale
            value, axes = gain - offset.to(gain), ()
        if owner in self.norm_of and value.ndim == 2:
            gain = rms_gain(self.anatomy.module(self.norm_of[owner], dense)) * self.basis.scale
            value = value.to(torch.promote_types(value.dtype, gain.dtype))
            value = value * (gain if input_axis(module) else gain[:, None])
        for axis in axes:
            value = self.basis.cut(value, axis)
        parameter.data.copy_(value)
