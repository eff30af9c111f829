"""accelerate's disk offload, with the layer after the one that computes read ahead."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import named_module_tensors
from safetensors import safe_open
from torch import nn

from hf_efficient.integrations.transformers_compat import block_classes


class LayerPrefetch:
    """Reads the weights of the next layer from the disk while a layer computes, for a model of which `device_map` keeps
    a part on the disk.

    A model larger than memory is loaded with `device_map="auto"`, `max_memory` and `offload_folder`, or with a
    `device_map` that names "disk"; its weights may be compressed. accelerate then reads each weight when it is needed,
    and drops it afterwards. With this object a thread reads the weights of the next decoder layer ahead; after the last
    layer those of the first, for the next token. The outputs have the same bits. Memory holds one layer more.

    >>> model = AutoModelForCausalLM.from_pretrained(
    ...     folder, device_map="auto", max_memory={"cpu": "4GB"}, offload_folder="offload"
    ... )
    >>> prefetch = LayerPrefetch()
    >>> prefetch.attach(model)
    >>> model.generate(**inputs)
    >>> prefetch.stats()["bytes_ahead"]
    """

    def __init__(self):
        self._layers: list[_Layer] = []
        self._handles: list = []
        self._threads: ThreadPoolExecutor | None = None

    def attach(self, model: nn.Module) -> None:
        """Begins to read ahead.

        Raises ValueError if this object serves a model already, or if no decoder layer of `model` is on the disk.
        """
        if self._layers:
            raise ValueError("attach(): this LayerPrefetch serves a model already: make another, or detach() first")
        blocks = [module for module in model.modules() if type(module).__name__ in block_classes(model)]
        layers = [layer for layer in map(_Layer, blocks) if layer.wanted]
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no decoder layer on the disk: load it with a device_map that names "
                '"disk", or with "auto", max_memory and offload_folder'
            )
        self._layers, self._threads = layers, ThreadPoolExecutor(1, thread_name_prefix="layers")
        for layer, following in zip(layers, [*layers[1:], layers[0]]):
            layer.attach()
            # one alone is read for the next forward, when its own is over
            register = layer.module.register_forward_pre_hook if len(layers) > 1 else layer.module.register_forward_hook
            self._handles.append(register(lambda *_, following=following: self._begin(following)))

    def detach(self) -> None:
        """Leaves the reading to accelerate again."""
        for handle in self._handles:
            handle.remove()
        if self._threads is not None:
            self._threads.shutdown()
        for layer in self._layers:
            layer.detach()
        self._layers, self._handles, self._threads = [], [], None

    def stats(self) -> dict[str, int]:
        """Since `attach`: `layers` on the disk, `bytes_ahead` that were read while another layer computed, and
        `bytes_waited`, that accelerate had to read itself."""
        return {
            "layers": len(self._layers),
            "bytes_ahead": sum(layer.bytes_ahead for layer in self._layers),
            "bytes_waited": sum(layer.bytes_waited for layer in self._layers),
        }

    def _begin(self, layer: "_Layer") -> None:
        layer.is_read = self._threads.submit(layer.read)


class _Layer:
    """A decoder layer. wanted: (hook of accelerate, name) of its weights that lie on the disk. is_read: of the reading
    that is under way or done; its result holds their tensors until they are taken."""

    def __init__(self, module: nn.Module):
        self.module, self.is_read = module, None
        self.bytes_ahead = self.bytes_waited = 0
        self.wanted = [
            (hook, name) for part in module.modules() for hook in _hooks_of(part) for name in _names(part, hook)
        ]
        self._maps = {hook: hook.weights_map for hook, _ in self.wanted}

    def attach(self) -> None:
        for hook, own in self._maps.items():
            hook.weights_map = _Ahead(self, hook, own)

    def detach(self) -> None:
        for hook, own in self._maps.items():
            hook.weights_map = own
        self.is_read = None

    def read(self) -> dict[tuple, torch.Tensor]:
        """The weights, in memory of their own: those of a mapped file would be read when they are used. A safetensors
        file is opened once: accelerate opens it for each weight."""
        found, in_files = {}, {}
        with torch.inference_mode(False):
            for hook, name in self.wanted:
                entry = _entry(self._maps[hook], name)
                if "safetensors_file" in entry:
                    in_files.setdefault(entry["safetensors_file"], []).append((hook, name, entry))
                else:
                    found[hook, name] = self._maps[hook][name].clone()
            for path, wanted in in_files.items():
                with safe_open(path, "pt") as file:
                    for hook, name, entry in wanted:
                        tensor = file.get_tensor(entry.get("weight_name", _full_name(self._maps[hook], name)))
                        dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else tensor.dtype
                        found[hook, name] = tensor.to(dtype, copy=True)
        return found

    def take(self, hook, name: str) -> torch.Tensor:
        """A weight that was read ahead, else from the disk."""
        reading: Future | None = self.is_read
        value = None if reading is None else reading.result().pop((hook, name), None)
        if value is None:
            value = self._maps[hook][name]
            self.bytes_waited += value.nbytes
        else:
            self.bytes_ahead += value.nbytes
        return value


class _Ahead(Mapping):
    """Stands for the `weights_map` of one of accelerate's hooks."""

    def __init__(self, layer: _Layer, hook, own: Mapping):
        self._layer, self._hook, self._own = layer, hook, own

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._layer.take(self._hook, name)

    def __iter__(self):
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _full_name(weights_map: Mapping, name: str) -> str:
    return f"{getattr(weights_map, 'prefix', '')}{name}"


def _entry(weights_map: Mapping, name: str) -> dict:
    """What accelerate's index says of a weight; nothing where there is no index."""
    index = getattr(getattr(weights_map, "dataset", weights_map), "index", {})
    return index.get(_full_name(weights_map, name), {})


def _hooks_of(module: nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    found = [each for each in getattr(hook, "hooks", (hook,)) if isinstance(each, AlignDevicesHook)]
    return [each for each in found if each.offload and each.weights_map is not None]


def _names(module: nn.Module, hook: AlignDevicesHook) -> list[str]:
    """The weights that `hook` brings for a forward of `module` and that lie on the disk."""
    tensors = named_module_tensors(
        module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
    )
    in_memory = getattr(getattr(hook.weights_map, "dataset", hook.weights_map), "state_dict", {})
    return [name for name, _ in tensors if _full_name(hook.weights_map, name) not in in_memory]
