"""Tensors as a cache makes them: zeros that take memory where they are written, and values copied to a device."""

import math
import mmap

import torch


_ALLOCATOR_BYTES = 1 << 17  # up to here torch's allocator reuses memory, so that a mapping would cost more
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def to_device(values: list, dtype: torch.dtype, device) -> torch.Tensor:
    """`values` as a tensor on `device`. The host does not wait: CUDA copies from pinned memory, which torch keeps
    alive."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def lazy_zeros(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`like.new_zeros(shape, dtype=dtype)` whose pages of memory, on a CPU, are allocated when they are first written.

    Raises MemoryError where there is no address space for it.
    """
    dtype = like.dtype if dtype is None else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    is_plain = type(like) in _PLAIN and not torch._C._len_torch_dispatch_stack() and not torch.compiler.is_compiling()
    if like.device.type != "cpu" or nbytes < _ALLOCATOR_BYTES or not is_plain:
        return like.new_zeros(shape, dtype=dtype)
    return torch.frombuffer(_mapping(nbytes), dtype=torch.uint8).view(dtype).view(shape)


def _mapping(nbytes: int) -> mmap.mmap:
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            return mmap.mmap(-1, nbytes)
        # Without a reservation the mapping may exceed the machine's memory. A forked process writes to its own copy.
        reserved = getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserved)
    except OSError as error:
        raise MemoryError(f"no address space for {nbytes} bytes of a cache: {error}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # with huge pages one token takes 2 MiB in every layer
        except OSError:  # a kernel without huge pages
            pass
    return memory
