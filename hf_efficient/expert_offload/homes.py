"""Storage for the experts of a layer that are not on the device: host memory, or a mapped file."""

import functools
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_efficient.expert_offload.copies import Tensors
from hf_efficient.expert_offload.modules import layouts_of, layouts_over
from hf_efficient.expert_offload.residents import by_expert
from hf_efficient.experts import EfficientExperts, expert_weight_names
from hf_efficient.tensor_files import mapped


_ALIGNED = 64  # bytes: where tensors begin in a file


@dataclass(frozen=True)
class Home:
    """The experts of one module.

    Args:
        experts: the tensors of each.
        names: the Parameters of the module that lie here; none where layouts do.
        file: deletes the file that they are in; None for memory.
        make, frees: see `Residents`.
    """

    experts: list[Tensors]
    names: list[str]
    file: weakref.finalize | None
    make: Callable | None = None
    frees: bool = False

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return sum(tensor.nbytes for tensor in self.experts[0].values())

    def leave(self, module: nn.Module, device: torch.device) -> None:
        """Moves the weights of `module` to `device`, and deletes the file."""
        if isinstance(module, EfficientExperts):
            module.restore_canonical()
        for name in self.names:
            tensor = module._parameters[name].data
            moved = tensor.to(device, copy=self.file is not None)
            module._parameters[name] = nn.Parameter(moved, requires_grad=False)
        if self.file is not None:
            self.file()


def weight_names(module: nn.Module) -> list[str]:
    """The Parameters of a dense or compressed experts module that hold weights of all experts."""
    if isinstance(module, EfficientExperts):
        return [name for weight in module.compressed_weights() for name in weight.names().values()]
    return expert_weight_names(module)


def home_of(module: nn.Module, device: torch.device, disk: Path | None) -> Home:
    """Moves the weights of an experts module to host memory (pinned for an accelerator), or to a file in `disk`."""
    if device.type == "cpu" and isinstance(module, EfficientExperts):
        layouts = _movable_layouts(module)
        if layouts is not None:
            return _home_of_layouts(module, layouts, disk)
    names = weight_names(module)
    tensors = {name: module._parameters[name].data for name in names}
    moved, file = _moved(module, tensors, device, disk)
    for name, tensor in moved.items():
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    experts = by_expert({name: module._parameters[name] for name in names})
    if not isinstance(module, EfficientExperts):
        return Home(experts, names, file)
    return Home(experts, names, file, functools.partial(layouts_of, module.compressed_weights()), frees=True)


def _movable_layouts(module: EfficientExperts) -> dict[str, list] | None:
    """Prefix -> the layout of each expert, where nothing but the tensors of a layout has to move."""
    dtype = module._parameters[module._expert_names[0]].dtype
    layouts = {weight.prefix: module.layouts(weight.prefix, dtype) for weight in module.compressed_weights()}
    if all(isinstance(own, list) and own[0].over(own[0].tensors) is not None for own in layouts.values()):
        return layouts
    module.restore_canonical()
    return None


def _home_of_layouts(module: EfficientExperts, layouts: dict[str, list], disk: Path | None) -> Home:
    """Layouts take longer to make than a forward reads them: they are kept, and the Parameters they replaced are made
    of them where the module is saved."""
    tensors = {
        f"{prefix}{name}_{expert}": tensor
        for prefix, own in layouts.items()
        for expert, layout in enumerate(own)
        for name, tensor in layout.tensors.items()
    }
    moved, file = _moved(module, tensors, torch.device("cpu"), disk)
    experts: list[Tensors] = [{} for _ in range(module.num_experts)]
    for prefix, own in layouts.items():
        for expert, layout in enumerate(own):
            parts = {name: moved[f"{prefix}{name}_{expert}"] for name in layout.tensors}
            own[expert] = layout.over(parts)
            experts[expert] |= {prefix + name: tensor for name, tensor in parts.items()}
        for name, tensor in module._layout_tensors(prefix).items():
            module.register_buffer(name, tensor, persistent=False)
    first = {prefix: own[0] for prefix, own in layouts.items()}
    return Home(experts, [], file, functools.partial(layouts_over, first))


def _moved(module: nn.Module, tensors: Tensors, device: torch.device, disk: Path | None):
    """(`tensors` at home, what deletes their file). The file is deleted with `module`, too."""
    if disk is None:
        return {n: t.cpu() if device.type == "cpu" else t.cpu().pin_memory() for n, t in tensors.items()}, None
    path, moved, offset = disk / f"experts-{uuid.uuid4().hex}", {}, 0
    sizes = {name: -(-tensor.nbytes // _ALIGNED) * _ALIGNED for name, tensor in tensors.items()}
    whole = mapped(path, torch.uint8, (sum(sizes.values()),))
    file = weakref.finalize(module, path.unlink, missing_ok=True)
    for name, tensor in tensors.items():
        part = whole[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved[name], offset = part.copy_(tensor), offset + sizes[name]
    return moved, file
