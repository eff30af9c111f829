"""Compiles the C++ kernels (`<library>/<library>.cpp` in this folder) on the machine that runs them, and loads them.

A library is compiled when a layer first needs it and stored in `$HF_HOME/hf_efficient/cpu` under a hash of the sources,
the compiler and its flags, among them those of the tier (`tiers.py`): later processes only load it. It uses the threads
of the OpenMP runtime that torch has loaded. Without a compiler (`$CXX`, else g++, c++ or clang++) callers use torch's
operators, and one warning says so.

`$HF_EFFICIENT_SANITIZE` names sanitizers to compile with, such as `address,undefined`; such libraries have hashes of
their own, and the process ends at the first finding. `make sanitize` shows how to start such a process.
"""

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from hf_efficient.files import atomic_write, why_not_writable
from hf_efficient.kernels.native import structs, tiers
from hf_efficient.kernels.native.cpu_limits import limit_threads
from hf_efficient.kernels.native.openmp import openmp_runtime
from hf_efficient.kernels.native.tiers import cpu_features  # noqa: F401


logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-std=c++17", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")  # besides those of the tier
LIBRARIES = ("-lstdc++",)  # g++ links it by itself; gcc does not, which PEFT's BOFT leaves behind in $CXX
SANITIZE = "HF_EFFICIENT_SANITIZE"  # environment variable
FEATURES = tiers.BF16.features  # of the fastest kernels


def compiler() -> list[str] | None:
    """The command of the C++ compiler, None if there is none."""
    for command in [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]:
        program, *arguments = shlex.split(command)
        if found := shutil.which(program):
            return [found, *arguments]
    return None


def sanitizer_flags() -> list[str]:
    """The compiler's flags for `$HF_EFFICIENT_SANITIZE`; none where that is empty or not set."""
    names = os.environ.get(SANITIZE)
    return ["-O1", f"-fsanitize={names}", "-fno-sanitize-recover=all", "-g"] if names else []


def build(name: str, command: list[str]) -> Path:
    """The path of the library of `<name>/<name>.cpp` for the tier, compiled by `command` where it is missing.

    Raises:
        RuntimeError: the compiler fails (with its output), or torch has loaded no OpenMP runtime.
    """
    program, command = Path(command[0]).resolve(), [*command, *tiers.tier().flags]
    runtime = openmp_runtime()
    if runtime is None:
        raise RuntimeError("torch has loaded no OpenMP runtime")
    stamp = command, LIBRARIES, str(program), program.stat().st_mtime_ns, Path(runtime).name
    key = hashlib.sha256(repr(stamp).encode())
    for path in sorted(path for path in SOURCES.glob("*/*") if path.suffix in (".cpp", ".h")):
        key.update(path.read_bytes())
    library = Path(HF_HOME) / "hf_efficient" / "cpu" / f"{name}-{platform.machine()}-{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    if why_not_writable(library):  # for this process only
        library = Path(tempfile.mkdtemp()) / library.name
        atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(library) as partial:  # several processes may compile it at once
        source, headers = SOURCES / name / f"{name}.cpp", f"-I{SOURCES / 'common'}"
        arguments = [*command, headers, str(source), "-o", str(partial), runtime, *LIBRARIES]
        # a preloaded sanitizer is not meant for the compiler, which takes ten times as long with it
        environment = {**os.environ, "LD_PRELOAD": ""} if os.environ.get(SANITIZE) else None
        result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", env=environment)
        if result.returncode:
            raise RuntimeError(f"{shlex.join(arguments)}: {result.stderr[-2000:]}")
    return library


@tiers.once_a_tier
def load(name: str, structures: tuple[type[ctypes.Structure], ...], **definitions: int) -> ctypes.CDLL | None:
    """The library of `<name>/<name>.cpp`, compiled with the macros `definitions`.

    Returns None where torch's operators are to be used: that is the tier, there is no compiler, or it fails.

    Raises:
        ValueError: `$HF_EFFICIENT_CPU` names no tier of this CPU.
        LayoutMismatch: `structures`, the mirrors of all that the library exports, differ from it.
    """
    if tiers.tier() is tiers.TORCH:
        return None
    try:
        command = compiler()
        if command is None:
            raise RuntimeError("no C++ compiler (g++, or $CXX)")
        macros = [f"-D{key}={value}" for key, value in definitions.items()]
        library = ctypes.CDLL(str(build(name, [*command, *FLAGS, *sanitizer_flags(), *macros])))
    except (OSError, RuntimeError, ValueError) as reason:
        _warn_once(str(reason))
        return None
    structs.check(library, structures)
    limit_threads()
    return library


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(f"hf_efficient's C++ kernels are not used, torch's slower operators are: {reason}")
