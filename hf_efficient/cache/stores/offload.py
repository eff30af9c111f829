"""Moves pages that are not in use from the device to host memory, and from there to the disk.

Paper: Yu et al., Stateful Large Language Model Serving with Pensieve (https://arxiv.org/abs/2312.05516), which moves
parts of a conversation; here the unit is one layer of one `PagedCache`, and each conversation has a cache of its own.
"""

import os
import weakref
from pathlib import Path

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.cache.stores.tiered import TieredStore


class Offload:
    """Limits the device memory of several `PagedCache`s: pages beyond the limit move to the host or the disk. The
    results have the same bits as without it, as long as forwards are not compiled. (On an accelerator `generate`
    compiles forwards over a pool of fixed size, and never with an `Offload`.)

    When the pages on a device exceed the limit, those that are needed last leave: first the layers of the caches that
    ran longest ago (idle chats), then the layer that the running cache has just used (a context larger than the
    device). Each layer is copied back while the layer before it computes; on a CUDA device asynchronously, from pinned
    memory, on a separate stream. Only blocks that changed are copied out again. A decode step waits for the transfer of
    the bytes that it needs. Caches that share an `Offload` must run in one thread.

    >>> offload = Offload("4GB")
    >>> chats = [PagedCache(model.config, offload=offload) for _ in range(10)]

    Args:
        device_memory: bytes of pages that may stay on each device, an int or "512MB", "2GiB". Two layers of the running
            cache always stay. The pages of a model on the CPU move within host memory, so there only `disk` saves
            memory.
        host_memory: bytes of host memory for the pages that left; needs `disk`. None: no limit.
        disk: a folder for the pages beyond that, one memory-mapped safetensors file per layer. A file is deleted when
            it is read, or with its cache. Files are read when they are needed, not ahead.

    Attributes:
        bytes_to_device, bytes_to_host, bytes_to_disk: bytes copied so far.

    Raises ValueError for other arguments.
    """

    def __init__(
        self, device_memory: int | str, host_memory: int | str | None = None, disk: str | os.PathLike | None = None
    ):
        if (host_memory is None) != (disk is None):
            raise ValueError(
                f"Offload(host_memory={host_memory!r}, disk={disk!r}): give both, what may stay in host memory and "
                "where the rest goes, or neither"
            )
        self.device_memory = parse_bytes("device_memory", device_memory)
        self.host_memory = None if host_memory is None else parse_bytes("host_memory", host_memory)
        self.disk = None if disk is None else Path(disk)
        if self.disk is not None and not self.disk.is_dir():
            raise ValueError(f"disk={str(disk)!r}: must be a folder that exists")
        self.bytes_to_device = self.bytes_to_host = self.bytes_to_disk = 0
        self._caches: weakref.WeakSet[CacheTiers] = weakref.WeakSet()
        self._turns = 0

    def __deepcopy__(self, memo) -> "Offload":
        return self  # a copied cache shares the memory with the others

    def use(self, store: TieredStore) -> None:
        """Copies the pages of `store` to its device, and starts to copy those of the layer after it."""
        self._turns += 1
        store.tiers.turn = self._turns
        following = store.tiers.after(store)
        keep = [store, following] if following.device == store.device else [store]
        if any(not each.is_resident for each in keep):
            self.fit(keep, store)
            for each in keep:
                self.bytes_to_device += each.bring()
        store.wait()

    def fit(self, keep: list[TieredStore], current: TieredStore) -> None:
        """Moves pages from the device of `current` to the host until there is room for those of `keep`."""
        device = current.device
        candidates = [
            each for each in self._stores() if each.device == device and each.is_resident and each not in keep
        ]
        total = sum(each.nbytes for each in (*keep, *candidates))
        for each in sorted(candidates, key=lambda each: self._next_use(each, current), reverse=True):
            if total <= self.device_memory:
                break
            total -= each.nbytes
            self.leave(each, current)

    def leave(self, store: TieredStore, current: TieredStore | None = None) -> None:
        """Moves the pages of `store` to the host, and what exceeds `host_memory` there to the disk."""
        self.bytes_to_host += store.leave()
        if self.host_memory is None:
            return
        held = [each for each in self._stores() if each.host_nbytes]
        total = sum(each.host_nbytes for each in held)
        held.sort(key=lambda each: (each.is_resident, self._next_use(each, current)), reverse=True)
        for each in held:
            if total <= self.host_memory:
                break
            total -= each.host_nbytes
            if each.is_resident:
                each.drop_host_copy()
            else:
                self.bytes_to_disk += each.spill(self.disk)

    def _stores(self) -> list[TieredStore]:
        return [store for tiers in self._caches for store in tiers.stores]

    @staticmethod
    def _next_use(store: TieredStore, current: TieredStore | None) -> tuple:
        """Larger for what is needed later: stores of other caches, the longer ago these ran; then by the layers
        between."""
        own = current is not None and store.tiers is current.tiers
        return not own, -store.tiers.turn, store.tiers.distance(store, current if own else None)


class CacheTiers:
    """The stores of one cache in the order in which a forward uses them."""

    def __init__(self, offload: Offload):
        self.offload = offload
        self.turn = 0  # the number of the last use, of all uses of the `Offload`
        self._stores: list[weakref.ref[TieredStore]] = []
        offload._caches.add(self)

    def __deepcopy__(self, memo) -> "CacheTiers":
        return CacheTiers(self.offload)

    @property
    def stores(self) -> list[TieredStore]:
        return [store for each in self._stores if (store := each()) is not None]

    def adopt(self, store, state) -> TieredStore:
        """Wraps the store of the next layer, whose blocks are those of `state`."""
        tiered = TieredStore(store, state, self)
        self._stores = [weakref.ref(each) for each in (*self.stores, tiered)]
        self.offload.fit([tiered], tiered)
        return tiered

    def after(self, store: TieredStore) -> TieredStore:
        stores = self.stores
        return stores[(stores.index(store) + 1) % len(stores)]

    def distance(self, store: TieredStore, current: TieredStore | None) -> int:
        """How many layers are used before `store`, from `current` on, or from the first where that is None."""
        stores = self.stores
        return (stores.index(store) - (0 if current is None else stores.index(current))) % len(stores)

    def park(self) -> None:
        """Moves the pages of all layers to the host."""
        for store in self.stores:
            if store.is_resident:
                self.offload.leave(store)
