"""K split over programs. Each program stores its part of the sum, and the one that arrives last adds the parts in their
order, so that the result does not depend on the order of arrival."""

import contextlib
import functools
from contextvars import ContextVar

import torch
import triton
import triton.language as tl

from .launch_configs import Tile, choose_steps_per_split


_ROCM = tl.constexpr(torch.version.hip is not None)


@triton.jit
def arrive(part, parts_at, part_stride, inside, arrivals_at, split, splits):
    """Stores `part` at parts_at + split * part_stride. Returns whether all others have done so. The counter (int32) is
    0 before the first arrival and again after the last."""
    tl.store(parts_at + split * part_stride, part, mask=inside)
    if _ROCM:  # its barrier does not wait for the stores of other wavefronts: each makes its own visible
        tl.atomic_add(arrivals_at + tl.zeros([512], tl.int32), 0, sem="release", scope="gpu")
    tl.debug_barrier()  # every thread's sums are written before one thread says so
    last = tl.atomic_add(arrivals_at, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(arrivals_at, 0)
    return last


@triton.jit
def sum_of_parts(parts_at, part_stride, inside, splits, SHAPE_0: tl.constexpr, SHAPE_1: tl.constexpr):
    """The sum of what `arrive` has stored of all splits, in their order: [SHAPE_0, SHAPE_1] in the dtype of the parts,
    0 where not `inside`."""
    total = tl.zeros((SHAPE_0, SHAPE_1), parts_at.dtype.element_ty)
    for split in range(splits):
        total += tl.load(parts_at + split * part_stride, mask=inside, other=0, cache_modifier=".cg")
    return total


@functools.cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU. 4 in the interpreter."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


_arrivals: dict[torch.device, torch.Tensor] = {}
_owned: ContextVar[torch.Tensor | None] = ContextVar("arrivals_of_a_graph", default=None)


@contextlib.contextmanager
def counters_in(buffer: torch.Tensor):
    """Inside, launches on the device of `buffer` (int32 zeros, which they leave zero) count in it as far as it is large
    enough. For the capture of a CUDA graph, which owns the buffer and whose launches do not overlap: it then needs no
    kernels that clear counters."""
    token = _owned.set(buffer)
    try:
        yield
    finally:
        _owned.reset(token)


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """int32 [>= count] of zeros, which kernels leave zero.

    Launches on the default stream of a device do not overlap and share one buffer. Other streams get a new one: graphs
    captured on one stream may be replayed on several, and torch.compile warms its graphs up on a side stream, in a pool
    that must keep nothing.
    """
    owned = _owned.get()
    if owned is not None and owned.device == device and owned.numel() >= count:
        return owned
    if device.type == "cpu" or torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device not in _arrivals or _arrivals[device].numel() < count:
        _arrivals[device] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return _arrivals[device]


def split(tile: Tile, programs: int, steps: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
    """How a launch of `programs` tiles splits `steps` of K.

    Returns:
        (steps of a split, number of splits, partial sums [splits, *shape] of `dtype`, arrival counters); the last two
        are None for a single split.
    """
    per_split = choose_steps_per_split(tile, programs, steps, processors(device))
    splits = triton.cdiv(steps, per_split)
    if splits == 1:
        return per_split, 1, None, None
    return (
        per_split,
        splits,
        torch.empty(splits, *shape, dtype=dtype, device=device),
        arrival_counters(programs, device),
    )
