"""K split over programs: each stores its part of the sum, and whoever arrives last adds the parts in their order, so that
the result does not depend on the order of arrival."""

import torch
import triton
import triton.language as tl


_ROCM = tl.constexpr(torch.version.hip is not None)


@triton.jit
def arrive(part, parts_at, part_stride, inside, arrivals_at, split, splits):
    """Stores `part` at parts_at + split * part_stride and tells whether all others have done so. The counter (int32, 0
    before) is 0 again afterwards."""
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
    total = tl.zeros((SHAPE_0, SHAPE_1), parts_at.dtype.element_ty)
    for split in range(splits):
        total += tl.load(parts_at + split * part_stride, mask=inside, other=0, cache_modifier=".cg")
    return total
