"""`TieredStore`: the pages of one layer on its device, in host memory or in a file."""

import copy
import uuid
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hf_efficient.cache.stores.full_precision import PageStore


# methods of a `PageStore` that touch no pages
_WITHOUT_PAGES = ("select", "drop", "check_rewind", "form_of", "restored", "settled", "beginning")


class TieredStore:
    """Wraps a `PageStore` of any format, whose pages come to the device when they are used.

    While they are away, `inner.pages` is None. The host has a copy of the blocks in `_synced`, also while the pages are
    on the device. `_used` are the blocks that hold tokens. Both are bool [capacity] in numpy.
    """

    takes_steps = True

    def __init__(self, inner: PageStore, state, tiers):
        self.inner, self.state, self.tiers = inner, state, tiers
        self.capacity = inner.capacity
        self._block_bytes = inner.nbytes // max(self.capacity, 1)
        self._host: dict[str, torch.Tensor] | None = None
        self._file: weakref.finalize | None = None  # deletes the file while the pages are in one
        self._arrival = self._departure = None  # events of copies under way
        self._used = self._used_now()
        self._synced = np.zeros(self.capacity, dtype=bool)

    def __getattr__(self, name):
        """Everything else that the format has. Its methods may read and write pages."""
        if name == "inner":  # not there yet while an object is being copied
            raise AttributeError(name)
        value = getattr(self.inner, name)
        if callable(value) and name not in _WITHOUT_PAGES:
            self.forget_host_copy()
        return value

    def __deepcopy__(self, memo):
        self._resident()
        tiers = copy.deepcopy(self.tiers, memo)
        duplicate = tiers.adopt(copy.deepcopy(self.inner, memo), copy.deepcopy(self.state, memo))
        duplicate._used = self._used
        return duplicate

    @property
    def pages(self) -> dict[str, torch.Tensor]:
        """The pages on the device. The caller may write to them, so the host's copy is no longer valid."""
        self.forget_host_copy()
        return self.inner.pages

    @property
    def nbytes(self) -> int:
        """Bytes of all pages on the device, when they are there."""
        return self.capacity * self._block_bytes

    def make_room(self, capacity, moves, copies) -> None:
        offload, plan = self.tiers.offload, self.state.plan
        offload.use(self)
        self.inner.make_room(capacity, moves, copies)
        if moves is not None or self.inner.capacity != self.capacity:
            grown = self.inner.capacity > self.capacity
            self.capacity = self.inner.capacity
            self._block_bytes = self.inner.nbytes // self.capacity
            known = self._synced[: self.capacity if moves is None else 0]
            self._synced = np.pad(known, (0, self.capacity - len(known)))
            if grown:
                offload.fit([self], self)
        lag = self.inner.lag
        self._synced[plan.cached(("written", lag), lambda: _written_blocks(plan, lag))] = False
        self._used = plan.cached("used", self._used_now)

    def rewind(self, lengths: list[int]) -> None:
        if self.inner.rows:  # they may take tokens back from pages
            self._resident()
        self.inner.rewind(lengths)

    def write(self, *args) -> None:
        self._resident()
        self.inner.write(*args)

    def update(self, *args):
        self._resident()
        return self.inner.update(*args)

    def make_ready(self, plan) -> None:
        self._resident()
        self.inner.make_ready(plan)

    def read(self, *args):
        self._resident()
        return self.inner.read(*args)

    def attend(self, *args, **options) -> torch.Tensor:
        self._resident()
        return self.inner.attend(*args, **options)

    def append_and_attend(self, *args, **options) -> torch.Tensor:
        if not self.is_resident:
            raise RuntimeError(
                "decode_step() needs the pages of all layers on the device, and Offload(device_memory="
                f"{self.tiers.offload.device_memory}) has no room for {self.nbytes} bytes in each: give it more, or "
                "leave out decode_step()"
            )
        return self.inner.append_and_attend(*args, **options)

    def static_tensors(self) -> list[torch.Tensor]:
        self._resident()
        return self.inner.static_tensors()

    @property
    def is_resident(self) -> bool:
        return self.inner.pages is not None

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(pages.nbytes for pages in (self._host or {}).values())

    def bring(self) -> int:
        """Queues the copies to the device unless the pages are there. Returns their bytes."""
        if self.is_resident:
            return 0
        host = self._host if self._file is None else load_file(self._path)
        with torch.inference_mode(False):
            self.inner.pages = {
                name: torch.zeros(self.capacity, *pages.shape[1:], dtype=pages.dtype, device=self.device)
                for name, pages in host.items()
            }
        number, self._arrival = _copy(self.inner.pages, host, self._synced & self._used, self.device)
        if self._file is not None:
            self._file()
            self._file = None
            self._synced[:] = False
        return number

    def wait(self) -> None:
        """Makes the work that is queued on the device from now on wait for the pages."""
        if self._arrival is not None:
            self._arrival.wait(torch.cuda.current_stream(self.device))
            self._arrival = None

    def leave(self) -> int:
        """Queues the copies to the host of what it does not have, and drops the pages. Returns their bytes."""
        self.wait()
        pages, used = self.inner.pages, np.flatnonzero(self._used)
        top = int(used[-1]) + 1 if len(used) else 0
        if self._host is None or len(next(iter(self._host.values()))) < top:
            size, self._synced = min(top + top // 4, self.capacity), np.zeros_like(self._synced)
            pin = self.device.type == "cuda"
            with torch.inference_mode(False):
                self._host = {
                    name: torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=pin)
                    for name, tensor in pages.items()
                }
        number, self._departure = _copy(self._host, pages, self._used & ~self._synced, self.device)
        self._synced = self._used.copy()
        self.inner.drop_pages()
        return number

    def forget_host_copy(self) -> None:
        """Brings the pages to the device, where they may be written to."""
        self._resident()
        self._synced[:] = False

    def drop_host_copy(self) -> None:
        """Frees the host memory while the pages are on the device."""
        self._host = None
        self._synced[:] = False

    def spill(self, folder: Path) -> int:
        """Moves the host's copy to a file. Returns its bytes."""
        if self._departure is not None:
            self._departure.synchronize()
        path = folder / f"{uuid.uuid4().hex}.safetensors"
        file = weakref.finalize(self, path.unlink, missing_ok=True)
        try:
            save_file(self._host, path)
        except BaseException:  # for example a full disk: the host keeps its copy
            file()
            raise
        self._path, self._file = path, file
        number, self._host = self.host_nbytes, None
        return number

    def _resident(self) -> None:
        if not self.is_resident:
            self.tiers.offload.use(self)
        self.wait()

    def _used_now(self) -> np.ndarray:
        return np.array(self.state.pool.ref_count, dtype=np.int64) > 0


def _written_blocks(plan, lag: int) -> list[int]:
    """The blocks of the new tokens of `plan`, and of the `lag` tokens before them."""
    size = plan.block_size
    return [
        block
        for table, start, length in zip(plan.tables, plan.starts, plan.lengths)
        for block in table[max(start - lag, 0) // size : -(-length // size)]
    ]


def _runs(blocks: np.ndarray) -> Iterable[tuple[int, int]]:
    """(start, stop) of each run of consecutive blocks in a bool mask."""
    edges = np.flatnonzero(np.diff(blocks, prepend=False, append=False)).tolist()
    return zip(edges[::2], edges[1::2])


def _copy(destinations: dict, sources: dict, blocks: np.ndarray, device: torch.device) -> tuple[int, object]:
    """Copies the blocks of a bool mask between the host and `device`.

    On CUDA the copies wait for the work queued on the device so far and run beside what is queued later. Returns the
    bytes and the event of their arrival, None where the copies are done.
    """
    pairs = [
        (destination[first:last], sources[name][first:last])
        for first, last in _runs(blocks)
        for name, destination in destinations.items()
    ]
    number = sum(destination.nbytes for destination, _ in pairs)
    if device.type != "cuda":
        for destination, source in pairs:
            destination.copy_(source)
        return number, None
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for destination, source in pairs:
            destination.copy_(source, non_blocking=True)
    for tensor in (*destinations.values(), *sources.values()):
        if tensor.device.type == "cuda":
            tensor.record_stream(stream)  # keeps its memory until the copies are done
    return number, stream.record_event()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies in both directions, so that they run one after the other."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
