"""`ExpertOffload`: a mixture of experts in less memory of its device than its weights take."""

import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.expert_offload import modules
from hf_efficient.expert_offload.copies import Copier
from hf_efficient.expert_offload.dispatched import hook_of, without_hooks
from hf_efficient.expert_offload.homes import Home, home_of, weight_names
from hf_efficient.expert_offload.residents import POLICIES, Counts, Residents
from hf_efficient.experts import EfficientExperts, is_fused_experts, is_sorted_experts


class ExpertOffload:
    """Keeps some experts of each layer of a mixture on the device, and the others on the host or in files.

    The outputs have the same bits as without it. Dense and compressed experts are supported. Paper: Eliseev and Mazur,
    Fast Inference of Mixture-of-Experts Language Models with Offloading (https://arxiv.org/abs/2312.17238).

    >>> offload = ExpertOffload("8GB", policy="predicted", device="cuda")
    >>> offload.attach(model)
    >>> model.generate(**inputs)
    >>> offload.stats()["hit_rate"]

    Args:
        device_memory: bytes of experts on the device, an int or "512MB", "2GiB". Every layer has room for the same
            number of them, at least one. An expert that is used and does not stay takes memory in addition, one at a
            time.
        policy: which experts stay. "lru": those used last. "frequency": those used most often in recent forwards.
            "predicted": as "lru"; the router of the next layer also runs ahead, on the inputs of this layer, and the
            experts that it selects are copied.
        device: where the model computes; None: where it is. Everything but the experts is moved there.
        disk: a folder for the experts, one mapped file per layer, deleted by `detach` or with the model. None keeps
            them in host memory. On a CPU only `disk` saves memory, because the system can drop pages of files.

    Raises ValueError for other arguments.
    """

    def __init__(
        self,
        device_memory: int | str,
        policy: str = "lru",
        device: str | torch.device | None = None,
        disk: str | os.PathLike | None = None,
    ):
        self.device_memory = parse_bytes("device_memory", device_memory)
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
        if disk is not None and not Path(disk).is_dir():
            raise ValueError(f"disk={str(disk)!r}: must be a folder that exists")
        self.policy, self.device = policy, None if device is None else torch.device(device)
        self.disk = None if disk is None else Path(disk)
        self._attached: list[tuple[nn.Module, Home, Residents]] = []
        self._counts = Counts()

    def attach(self, model: nn.Module) -> None:
        """Offloads the experts of `model`, a mixture with all weights in memory.

        Raises:
            ValueError: this object serves a model already; the model has no experts that are supported; their weights
                are on the meta device or offloaded by accelerate; `device` is given for a model that a `device_map`
                spreads; `device_memory` has no room for one expert per layer; "predicted" does not support a router.
        """
        if self._attached:
            raise ValueError("attach(): this ExpertOffload serves a model already: make another, or detach() first")
        found = {name: module for name, module in model.named_modules() if _is_served(module)}
        _check(model, found, self.device)
        is_placed = any(hook_of(module) is not None for module in found.values())
        device = self.device or next(model.parameters()).device
        devices = {n: next(m.parameters()).device if is_placed else device for n, m in found.items()}
        for module in found.values():
            if isinstance(module, EfficientExperts):
                module.restore_canonical()
        self._check_room(found)
        routers = _routers(model, found) if self.policy == "predicted" else {}
        with without_hooks(found.values()):
            self._offload(found, devices, routers)
        if not is_placed:
            model.to(device)

    def _offload(self, found: dict[str, nn.Module], devices: dict[str, torch.device], routers: dict) -> None:
        """Moves the experts `found` to their homes. devices: where each module runs."""
        copiers, self._counts = {device: Copier(device) for device in devices.values()}, Counts()
        homes = [home_of(module, devices[name], self.disk) for name, module in found.items()]
        most = max(1, self.device_memory // sum(home.nbytes for home in homes))
        for (name, module), home in zip(found.items(), homes):
            copier = copiers[devices[name]]
            residents = Residents(home.experts, most, self.policy, copier, self._counts, home.make, home.frees)
            modules.offload(module, residents, home.names)
            self._attached.append((module, home, residents))
        layers = list(found)
        for name, following in zip(layers, layers[1:]):
            if following in routers:
                modules.predict(found[name], routers[following], found[following])

    def detach(self) -> None:
        """Brings all experts to the device; nothing is offloaded afterwards."""
        with without_hooks(module for module, *_ in self._attached):
            for module, home, residents in self._attached:
                modules.bring_back(module)
                home.leave(module, residents.copier.device)
        self._attached = []

    def stats(self) -> dict[str, int | float]:
        """Counts since `attach`, in experts.

        `hits`, `misses`: experts that a forward read and that were on the device (or being copied to it), and all
            others.
        `hit_rate`: share of the hits. `prefetched`, `prefetched_used`: copied ahead, and those of them that were read.
        `bytes_to_device`: bytes copied. `experts`, `resident`: in all layers, and how many may stay on the device.
        """
        counts = asdict(self._counts)
        return {
            **counts,
            "hit_rate": counts["hits"] / max(1, counts["hits"] + counts["misses"]),
            "experts": sum(len(residents.homes) for *_, residents in self._attached),
            "resident": sum(min(residents.most, len(residents.homes)) for *_, residents in self._attached),
        }

    def _check_room(self, found: dict[str, nn.Module]) -> None:
        sizes = (sum(module._parameters[name].nbytes for name in weight_names(module)) for module in found.values())
        one_each = sum(size // module.num_experts for size, module in zip(sizes, found.values()))
        if one_each > self.device_memory:
            raise ValueError(
                f"device_memory={self.device_memory} has no room for one expert of each of {len(found)} layers, which "
                f"take {one_each} bytes"
            )


def _is_served(module: nn.Module) -> bool:
    return isinstance(module, EfficientExperts) or is_fused_experts(module) or is_sorted_experts(module)


def _check(model: nn.Module, found: dict[str, nn.Module], device: torch.device | None) -> None:
    """Raises ValueError where the experts of `model` cannot be offloaded."""
    kind = type(model).__name__
    if not found:
        raise ValueError(f"{kind} has no experts that transformers keeps in one tensor: nothing can be offloaded")
    for name, module in found.items():
        if "Llama4" in type(module).__name__:
            raise ValueError(f"{name}: every token of {kind} passes all experts, so that offloading them is no use")
        if isinstance(module, modules.OffloadedExperts):
            raise ValueError(f"{name} is offloaded by another ExpertOffload: detach() it first")
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"{name} is offloaded by accelerate: load {kind} with a device_map of devices alone, and give "
                "ExpertOffload(disk=...) for files"
            )
        if isinstance(module, EfficientExperts) and any(w.format.experts for w in module.compressed_weights()):
            raise ValueError(f"{name}: experts with different numbers of bits cannot be offloaded")
        if hook_of(module) is not None and device is not None:
            raise ValueError(f"device={str(device)!r}: the device_map of {kind} says where {name} runs: leave it out")
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(f"{name} holds the experts of one process of several, which is not supported")


def _routers(model: nn.Module, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Name of experts -> their router, whose last output is int [T, k]."""
    routers = {}
    for name in found:
        block = model.get_submodule(name.rpartition(".")[0])
        routers[name] = next((m for m in block.children() if type(m).__name__.endswith("TopKRouter")), None)
        if routers[name] is None:
            raise ValueError(
                f'policy="predicted" asks the router beside {name}, and {type(block).__name__} has none that can be '
                'asked alone: use "lru" or "frequency"'
            )
    return routers
