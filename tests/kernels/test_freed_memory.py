"""Memory that a training step frees serves the next step."""

import pytest
import torch

from hf_efficient.kernels.native import heap


def faults(blocks: int) -> int:
    """Pages that the system cleared while so many blocks of 64 MB were taken, written and freed one by one."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(blocks):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_blocks_are_taken_again():
    if heap._mallopt is None or not heap._mallopt(heap._MMAP_THRESHOLD, heap._ALL):
        pytest.skip("a C library without mallopt, or one that refuses so large a threshold")
    with heap.freed_memory_kept():
        faults(8)  # a hole must hold a block and its alignment
        # of 65,536; tests before this one leave holes that are too small, until the heap has grown once
        assert min(faults(4) for _ in range(4)) < 1000
