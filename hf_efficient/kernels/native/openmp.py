"""The OpenMP runtime that torch has loaded, whose threads the C++ kernels share."""

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch


_GNU = "libgomp"
_NAMES = (_GNU, "libiomp5", "libomp")


def openmp_runtime() -> str | None:
    """The file of the OpenMP runtime in this process, torch's own where several are loaded; None where there is none.

    Systems other than Linux do not list what a process has loaded: there it is the one in torch's package. Windows has
    none that exports what the kernels call.
    """
    package = Path(torch.__file__).resolve().parent
    folders = (package / "lib", package.with_name("torch.libs"))  # wheels keep it in either
    if sys.platform == "win32":
        return None
    if sys.platform == "linux":
        lines = Path("/proc/self/maps").read_text().splitlines()
        loaded = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    else:
        loaded = {str(path) for folder in folders for path in folder.glob("*")}
    runtimes = [path for path in loaded if Path(path).name.startswith(_NAMES)]
    own = tuple(f"{folder}/" for folder in (package, folders[1]))
    return min(runtimes, key=lambda path: (not path.startswith(own), path), default=None)


def release_threads() -> None:
    """Ends the OpenMP threads that wait for the calling thread, before another one computes.

    Each Python thread that has computed keeps as many as torch's number of threads. GNU's runtime counts them all.
    Where there are more than CPUs they sleep between any two operators, which doubled the time of a served token. The
    calling thread gets new ones when it next computes. Other runtimes do not count them.
    """
    if (pause := _pause()) is not None:
        pause(1)  # soft: what was set stays


@functools.cache
def _pause() -> Callable[[int], int] | None:
    runtime = openmp_runtime()
    is_gnu = runtime is not None and Path(runtime).name.startswith(_GNU)
    return getattr(ctypes.CDLL(runtime), "omp_pause_resource_all", None) if is_gnu else None
