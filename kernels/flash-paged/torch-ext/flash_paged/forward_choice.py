"""Which kernel computes a prompt on GPUs of compute capability 9: the faster one, timed there once for each kind of
call. The environment variable FLASH_PAGED_FORWARD, read when the package is imported, names one instead."""

import os
import warnings
from collections.abc import Callable

import torch


VARIANTS = ("portable", "warp_specialized")
NAMED = os.environ.get("FLASH_PAGED_FORWARD")
LEAST_OPERATIONS = 5e10  # of a call that is timed: about 0.1 ms. Smaller ones are portable until then
_chosen: dict[tuple, str] = {}


def choose(kind: tuple, operations: float, out: torch.Tensor, run: Callable[[str], None]) -> str:
    """The variant for calls of a `kind` (device, dtype, head dim, whether causal, whether packed).

    operations: of this call. run: variant -> None, computes this call into `out`.

    The first large call of a kind outside a graph's capture runs both variants four times and waits for the GPU. A
    variant that fails, or gives other numbers than the portable one, is not taken, with a warning.
    """
    if kind in _chosen:
        return _chosen[kind]
    if operations < LEAST_OPERATIONS or (out.is_cuda and torch.cuda.is_current_stream_capturing()):
        return "portable"
    _chosen[kind] = "portable"
    try:
        portable = seconds(lambda: run("portable"))
        expected = out.float()
        special = seconds(lambda: run("warp_specialized"))
    except Exception as error:  # of the compiler or the driver, whatever it is
        warnings.warn(f"flash_paged: the warp-specialised kernel is not used, as it failed: {error!r}", stacklevel=2)
        return "portable"
    difference = (out.float() - expected).abs().max().item()
    if not difference <= 0.03 * expected.abs().max().item():
        warnings.warn(
            f"flash_paged: the warp-specialised kernel is not used, as its results differ by {difference}", stacklevel=2
        )
    elif special < portable:
        _chosen[kind] = "warp_specialized"
    return _chosen[kind]


def seconds(run: Callable[[], None]) -> float:
    """The least of three runs, after one that compiles."""
    run()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)
