"""Returns memory and threads to the operating system while a model loads: the heap that glibc keeps, pages of mapped
files, and OpenMP threads.

glibc keeps the memory of many short-lived buffers: 300 MB after quantizing a model of 270 MB. Mapped pages of a
checkpoint, from which a layout was made, count as memory of the process as long as any tensor of the file is in use.
Without this module, the process of a quantized model is larger than that of the original.
"""

import ctypes
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from hf_efficient.kernels.native.openmp import release_threads


_TRIM_EVERY = 1 << 24  # 16 MB of weights

_DONT_NEED = 4  # Linux' MADV_DONTNEED
_MMAP_THRESHOLD, _LARGE = -3, 1 << 17  # glibc's M_MMAP_THRESHOLD, and what it is at first
_TRIM_THRESHOLD, _LARGEST = -1, 1 << 25  # its M_TRIM_THRESHOLD, and what it raises the other one to at most
_ALL = 1 << 30

try:
    _malloc_trim, _mallopt = ctypes.CDLL(None).malloc_trim, ctypes.CDLL(None).mallopt
except (AttributeError, OSError, TypeError):  # another C library, another system
    _malloc_trim = _mallopt = None

try:
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
except (AttributeError, OSError, TypeError):
    _madvise = None


def map_large_blocks() -> None:
    """From now on the C library maps every block of 128 kB or more apart, and unmaps it when it is freed. Left alone it
    raises that limit to 32 MB, and the holes between blocks that live longer are lost to the process. Does nothing
    where the C library has no `mallopt`."""
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, _LARGE)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, the C library keeps what is freed for the next block of that size: a training step takes and frees
    hundreds of large blocks, and the system clears every page that it hands out anew. Afterwards free memory goes back.
    Does nothing where the C library has no `mallopt`, and keeps blocks of up to 32 MB where glibc takes no larger
    threshold."""
    if _mallopt is None:
        yield
        return
    if not _mallopt(_MMAP_THRESHOLD, _ALL):
        _mallopt(_MMAP_THRESHOLD, _LARGEST)
    _mallopt(_TRIM_THRESHOLD, _ALL)
    try:
        yield
    finally:
        _mallopt(_MMAP_THRESHOLD, _LARGEST)
        _mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        _malloc_trim(0)


class HeapTrimmer:
    """Counts the bytes of processed weights and returns free heap pages every 16 MB. Does nothing where the C library
    has no `malloc_trim`."""

    def __init__(self):
        self.pending = 0

    def count(self, nbytes: int) -> None:
        self.pending += nbytes
        if self.pending >= _TRIM_EVERY:
            self.flush()

    def flush(self) -> None:
        """Returns free heap pages now."""
        self.pending = 0
        if _malloc_trim is not None:
            _malloc_trim(0)

    def finish(self) -> None:
        """Returns free heap pages, and the OpenMP threads of this thread: servers compute in others."""
        self.flush()
        release_threads()


def drop_pages(start: int, nbytes: int) -> int:
    """Gives the whole pages of `nbytes` bytes at `start` back to the system, and returns their bytes. The addresses
    stay taken; what is read there next is what the file holds, or zeros where the pages are no file's. Does nothing on
    other systems than Linux."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise is None or sys.platform != "linux" or last <= first or _madvise(first, last - first, _DONT_NEED):
        return 0
    return last - first


class MappedFiles:
    """Where this process has mapped `files`. On other systems than Linux it knows of none."""

    def __init__(self, files: Iterable[str]):
        paths, self._ranges = {os.path.realpath(file) for file in files}, []
        if _madvise is None or not paths or sys.platform != "linux":
            return
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                addresses, *_, path = line.rstrip("\n").split(maxsplit=5)
                if path in paths:
                    self._ranges.append(tuple(int(address, 16) for address in addresses.split("-")))
        self._ranges.sort()

    def release(self, tensor: torch.Tensor) -> int:
        """Drops the whole pages of a contiguous `tensor` that lies in one of the files, and returns their bytes (0: it
        lies elsewhere). Nobody may have written into them: what is read next is what the file holds."""
        if not tensor.is_cpu or not tensor.is_contiguous():
            return 0
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        index = bisect_right(self._ranges, (start, 2**64)) - 1
        if index < 0 or end > self._ranges[index][1]:
            return 0
        return drop_pages(start, end - start)
