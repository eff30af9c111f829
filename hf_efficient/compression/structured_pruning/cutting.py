"""Builds the smaller model: an ordinary one of the same class, filled block by block with what stays of the dense
one."""

import copy

import torch
from torch import nn
from transformers import initialization

from hf_efficient.compression.structured_pruning.anatomy import LINEAR, Anatomy, input_axis, norms_before
from hf_efficient.integrations.transformers_compat import model_from_config
from hf_efficient.pruning.structured.basis import rms_gain


def cut_units(anatomy: Anatomy, name: str, value: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """The parameter `name` of a block (or one value for each row of it) without the units that go.

    kept: reader -> bool [G, R] of the units that stay."""
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
    """Compares the parameters of the smaller model `small`, on the meta device, with what is left of the dense one.

    kept: reader -> bool [G, R] of the units that stay in a block. axes: key of a parameter -> its axes along the
    residual stream, whose new width is `hidden`.

    Raises ValueError: the class of the model makes parameters of other shapes from its config.
    """
    block = anatomy.chain.names[0] + "."
    for name, parameter in small.named_parameters():
        if anatomy.key(name) != name and not name.startswith(block):
            continue  # the first block stands for all
        value = anatomy.model.get_parameter(name).data.to("meta")
        value = cut_units(anatomy, name.removeprefix(block), value, kept) if name.startswith(block) else value
        sizes = [hidden if axis in axes.get(anatomy.key(name), ()) else size for axis, size in enumerate(value.shape)]
        if sizes != list(parameter.shape):
            raise ValueError(
                f"{type(small).__name__} cannot have this shape: of {name} {sizes} would be left, but its config "
                f"({type(small.config).__name__}) makes it {list(parameter.shape)}"
            )


class Cutter:
    """Fills the smaller model.

    Args:
        pruning_plan: its `config`, `layers`, `basis` and `axes` are read.

    Attributes:
        small: the smaller model, on the device and in the dtype of the dense one.
        blocks: its blocks; `layers` says which dense layers they are.
        basis: of the residual stream; None where it stays as it is.

    Raises:
        ValueError: norms that a rotation of the residual stream cannot pass.
    """

    def __init__(self, anatomy: Anatomy, pruning_plan):
        self.anatomy, self.layers, self.model = anatomy, pruning_plan.layers, anatomy.model
        self.basis, self.axes = pruning_plan.basis, pruning_plan.axes
        self.norm_of = norms_before(anatomy, self.axes) if self.basis is not None and self.basis.rotates else {}
        with initialization.no_init_weights():
            small = model_from_config(type(self.model), pruning_plan.config, dtype=self.model.dtype)
        small.tie_weights()  # `no_init_weights` leaves that out too
        self.small = small.to(self.model.device).eval().requires_grad_(False)
        if self.model.generation_config is not None:
            self.small.generation_config = copy.deepcopy(self.model.generation_config)
        self.prefix = anatomy.chain.names[0].rpartition(".")[0] + "."
        self.blocks = list(self.small.get_submodule(self.prefix[:-1]))

    def fill_around(self) -> None:
        """Copies everything outside the blocks."""
        for name, parameter in self.small.named_parameters():
            if not name.startswith(self.prefix):
                self._put(parameter, name, self.model.get_parameter(name).data, self.anatomy.chain.modules[0])

    def fill_block(self, position: int, kept: dict[str, torch.Tensor]) -> None:
        """Copies what stays of a dense layer into block `position`. kept: reader -> bool [G, R] of the units that
        stay."""
        dense = self.anatomy.chain.modules[self.layers[position]]
        for name, parameter in self.blocks[position].named_parameters():
            value = cut_units(self.anatomy, name, dense.get_parameter(name).data, kept)
            self._put(parameter, f"*.{name}", value, dense)

    def _put(self, parameter: nn.Parameter, key: str, value: torch.Tensor, dense: nn.Module) -> None:
        """Writes the dense `value` of the parameter `key`, with the residual stream cut along its axes. dense: the
        block in which keys are looked up."""
        if self.basis is None:
            parameter.data.copy_(value)
            return
        owner, axes = key.rpartition(".")[0], self.axes.get(key, ())
        module = self.anatomy.module(owner, dense)
        gain = rms_gain(module) if axes and value.ndim == 1 and not isinstance(module, LINEAR) else None
        if gain is not None:
            offset = (gain - value.float()).mean().round()  # 1 for norms that multiply by (1 + weight), else 0
            gain = (
                torch.ones(parameter.shape, dtype=torch.float32)
                if self.basis.rotates
                else self.basis.cut(gain, 0) * self.basis.scale
            )
            value, axes = gain - offset.to(gain), ()
        # the gain of its norm is folded in, so that rotations pass the norm
        if owner in self.norm_of and value.ndim == 2:
            gain = rms_gain(self.anatomy.module(self.norm_of[owner], dense)) * self.basis.scale
            value = value.to(torch.promote_types(value.dtype, gain.dtype))
            value = value * (gain if input_axis(module) else gain[:, None])
        for axis in axes:
            value = self.basis.cut(value, axis)
        parameter.data.copy_(value)
