"""Zeros that take memory only where something is written: what a pool of many blocks consists of."""

import math
import mmap

import torch


_SMALL = 1 << 20  # bytes: what torch's allocator gives without a mapping of its own
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def lazy_zeros(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`like.new_zeros(shape, dtype=dtype)`. On a CPU the system hands out its pages of memory when they are first written, so
    that a large tensor costs neither memory nor time for what stays empty.

    Raises MemoryError where the address space is not to be had.
    """
    dtype = like.dtype if dtype is None else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    is_plain = type(like) in _PLAIN and not torch._C._len_torch_dispatch_stack() and not torch.compiler.is_compiling()
    if like.device.type != "cpu" or nbytes < _SMALL or not is_plain:
        return like.new_zeros(shape, dtype=dtype)
    return torch.frombuffer(_mapping(nbytes), dtype=torch.uint8).view(dtype).view(shape)


def _mapping(nbytes: int) -> mmap.mmap:
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            return mmap.mmap(-1, nbytes)
        # what is not reserved may be more than the memory of the machine; a forked process writes to its own
        reserved = getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserved)
    except OSError as error:
        raise MemoryError(f"no address space for {nbytes} bytes of a cache: {error}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a token would take 2 MiB of every layer
        except OSError:  # a kernel without huge pages
            pass
    return memory
