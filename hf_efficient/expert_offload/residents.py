"""Which experts of one layer are on the device."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_efficient.expert_offload.copies import Arrival, Copier, Tensors


POLICIES = ("lru", "frequency", "predicted")
_KEPT = 0.98  # what a use counts after one more forward


@dataclass
class Counts:
    """What happened since an `ExpertOffload` was attached, in experts; `bytes_to_device` in bytes."""

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    bytes_to_device: int = 0


class Residents:
    """The experts of one layer that are on the device. A forward holds `lock` from `begin` to its last `get`: another
    thread's would write over what it reads.

    Args:
        homes: the tensors of each expert, on the host or mapped from a file.
        most: how many experts may stay on the device.
        make: called with the tensors of an expert on the device and the dtype of inputs -> what its forward reads; None
            where it reads those tensors.
        frees: whether the tensors are freed then, but for what that holds.
    """

    def __init__(
        self,
        homes: list[Tensors],
        most: int,
        policy: str,
        copier: Copier,
        counts: Counts,
        make: Callable[[Tensors, torch.dtype], object] | None = None,
        frees: bool = False,
    ):
        self.homes, self.most, self.policy, self.copier, self.counts = homes, most, policy, copier, counts
        self.nbytes = sum(tensor.nbytes for tensor in homes[0].values())  # of an expert
        self.make, self.frees, self._dtype, self._versions = make, frees, None, None
        self.lock = threading.RLock()
        self._coming: dict[int, Arrival] = {}
        self.clear()

    def clear(self) -> None:
        """Nothing is on the device afterwards."""
        for arrival in self._coming.values():
            arrival.wait()
        self._held: dict[int, tuple] = {}  # (what forwards read, its tensors); the one used last comes last
        self._coming = {}
        self._ahead: set[int] = set()  # prefetched and not used yet
        self._passing: tuple[int, object] | None = None  # an expert that does not stay
        self._uses = [0.0] * len(self.homes)

    def read_from(self, weights: Tensors) -> None:
        """Drops what is on the device where `weights` are other tensors than before, or have changed."""
        versions = [(id(tensor), tensor._version) for tensor in weights.values()]
        if versions != self._versions:
            self.clear()
            self.homes, self._versions = by_expert(weights), versions

    def compute_in(self, dtype: torch.dtype) -> None:
        """The dtype of the inputs from now on."""
        if dtype is not self._dtype:
            if self._dtype is not None:
                self.clear()
            self._dtype = dtype

    def begin(self, active: list[int]) -> list[int]:
        """Notes that a forward is about to read the experts `active`, and begins to bring those that will stay. Returns
        them in an order in which they wait least."""
        self._passing = None
        self._uses = [uses * _KEPT for uses in self._uses]
        present = [expert for expert in active if expert in self._held]
        missing = [expert for expert in active if expert not in self._held]
        for expert in active:
            self._uses[expert] += 1
        for expert in present:
            self._held[expert] = self._held.pop(expert)
        self.counts.hits += len(present)
        self.counts.misses += len(missing)
        self.counts.prefetched_used += len(self._ahead.intersection(present))
        self._ahead.difference_update(active)
        brought = [expert for expert in missing if self._bring(expert, set(active), ahead=bool(present))]
        arrived = [expert for expert in present if expert not in self._coming]
        coming = [expert for expert in present if expert in self._coming]
        return [*arrived, *coming, *brought, *(expert for expert in missing if expert not in self._held)]

    def prefetch(self, experts: list[int]) -> None:
        """Begins to bring experts that the next forward of the layer will probably read, the most needed ones first, as
        many as can stay."""
        wanted = set(experts[: self.most])
        with self.lock:
            for expert in sorted(wanted.difference(self._held)):
                if self._bring(expert, wanted, ahead=True):
                    self._ahead.add(expert)
                    self.counts.prefetched += 1

    def get(self, expert: int) -> object:
        """What the forward reads of an expert, on the device."""
        if expert in self._coming:
            tensors = self._coming.pop(expert).wait()
            self._held[expert] = self._read(tensors), None if self.frees else tensors
        if expert in self._held:
            return self._held[expert][0]
        if self._passing is None or self._passing[0] != expert:
            self._passing = None  # freed first
            self._passing = expert, self._read(self._borrowed(expert))
        return self._passing[1]

    def _read(self, tensors: Tensors) -> object:
        return tensors if self.make is None else self.make(tensors, self._dtype)

    def _borrowed(self, expert: int) -> Tensors:
        """The weights of an expert for one forward. On a CPU they are read where they are."""
        sources = self.homes[expert]
        if next(iter(sources.values())).device == self.copier.device:
            return sources
        self.counts.bytes_to_device += self.nbytes
        return self.copier.start(sources, None, ahead=False).wait()

    def _bring(self, expert: int, needed: set[int], ahead: bool) -> bool:
        """Begins to bring an expert that is to stay. False where all that it could replace are `needed`, or, by the
        policy, worth more."""
        into = None
        if len(self._held) >= self.most:
            others = [other for other in self._held if other not in needed]
            if self.policy == "frequency":
                others = sorted((o for o in others if self._uses[o] < self._uses[expert]), key=self._uses.__getitem__)
            if not others:
                return False
            into = self._drop(others[0])
        self._coming[expert] = self.copier.start(self.homes[expert], into, ahead)
        self._held[expert] = None, None
        self.counts.bytes_to_device += self.nbytes
        return True

    def _drop(self, expert: int) -> Tensors | None:
        """Takes an expert off the device. Returns tensors that may be written over."""
        self._ahead.discard(expert)
        _, tensors = self._held.pop(expert)
        return self._coming.pop(expert).wait() if expert in self._coming else tensors


def by_expert(weights: Tensors) -> list[Tensors]:
    """The tensors of each expert, of those [E, ...] of all."""
    count = len(next(iter(weights.values())))
    return [{name: tensor.data[expert] for name, tensor in weights.items()} for expert in range(count)]
