"""C++ kernels (`<library>/<library>.cpp` in this folder), compiled on the machine that runs them when a layer first needs them.

The libraries stand in `$HF_HOME/hf_efficient/cpu` under a key of their sources, the compiler, its flags and the CPU's
features, so a later process only loads them. They use the threads of the OpenMP runtime that torch has loaded. Where
there is no compiler (`$CXX`, else g++, c++ or clang++), callers use torch's operators; a warning says so once.

`$HF_EFFICIENT_SANITIZE`, such as `address,undefined`, names sanitizers that they are compiled with, as libraries of their own:
the process ends at the first finding. `make sanitize` says how such a process is started.
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

import torch
from huggingface_hub.constants import HF_HOME

from hf_efficient.kernels.native import structs


logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-march=native", "-std=c++17", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")
LIBRARIES = ("-lstdc++",)  # g++ links it by itself; gcc does not, which PEFT's BOFT leaves behind in $CXX
SANITIZE = "HF_EFFICIENT_SANITIZE"  # environment variable
# Where the kernels are known to be faster than torch's operators.
FEATURES = frozenset(("avx512f", "avx512bw", "avx512vbmi", "avx512_bf16", "avx512_vnni"))


@functools.cache
def cpu_features() -> frozenset[str]:
    """What the CPU can do, in Linux' words; nothing on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(word for line in lines if line.startswith(("flags", "Features")) for word in line.split()[2:])


def compiler() -> list[str] | None:
    """The command of the C++ compiler, None if there is none."""
    for command in [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]:
        program, *arguments = shlex.split(command)
        if found := shutil.which(program):
            return [found, *arguments]
    return None


def openmp_runtime() -> str | None:
    """The file of the OpenMP runtime in this process: torch's own rather than another package's."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    runtimes = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    package = Path(torch.__file__).resolve().parent
    own = (f"{package}/", f"{package}.libs/")  # wheels keep it in either
    return min(runtimes, key=lambda path: (not path.startswith(own), path), default=None)


def sanitizer_flags() -> list[str]:
    """What the compiler is told for `$HF_EFFICIENT_SANITIZE`; nothing where that is empty or not set."""
    names = os.environ.get(SANITIZE)
    return ["-O1", f"-fsanitize={names}", "-fno-sanitize-recover=all", "-g"] if names else []


def build(name: str, command: list[str]) -> Path:
    """The compiled library of `<name>/<name>.cpp`. Raises RuntimeError with the compiler's words."""
    program = Path(command[0]).resolve()
    runtime = openmp_runtime()
    if runtime is None:
        raise RuntimeError("torch has loaded no OpenMP runtime")
    stamp = command, LIBRARIES, str(program), program.stat().st_mtime_ns, sorted(cpu_features()), Path(runtime).name
    key = hashlib.sha256(repr(stamp).encode())
    for path in sorted(path for path in SOURCES.glob("*/*") if path.suffix in (".cpp", ".h")):
        key.update(path.read_bytes())
    folder = Path(HF_HOME) / "hf_efficient" / "cpu"
    library = folder / f"{name}-{platform.machine()}-{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False)
    except OSError:  # a home that cannot be written: this process only
        library = Path(tempfile.mkdtemp()) / library.name
        atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
        partial = tempfile.NamedTemporaryFile(dir=library.parent, suffix=".partial", delete=False)
    partial.close()
    try:
        source, headers = SOURCES / name / f"{name}.cpp", f"-I{SOURCES / 'common'}"
        arguments = [*command, headers, str(source), "-o", partial.name, runtime, *LIBRARIES]
        # a preloaded sanitizer is not meant for the compiler, which takes ten times as long with it
        environment = {**os.environ, "LD_PRELOAD": ""} if os.environ.get(SANITIZE) else None
        result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", env=environment)
        if result.returncode:
            raise RuntimeError(f"{shlex.join(arguments)}: {result.stderr[-2000:]}")
        os.chmod(partial.name, 0o755)  # it was made its owner's only
        os.replace(partial.name, library)  # whole or not there, whoever else compiles it
    finally:
        Path(partial.name).unlink(missing_ok=True)
    return library


@functools.cache
def load(name: str, structures: tuple[type[ctypes.Structure], ...], **definitions: int) -> ctypes.CDLL | None:
    """The library of `<name>/<name>.cpp`, compiled with the macros `definitions`.

    Returns None where torch's operators are to be used: the CPU lacks `FEATURES`, there is no compiler, or it fails.

    Raises:
        LayoutMismatch: `structures`, the mirrors of all that the library exports, differ from it.
    """
    if not FEATURES <= cpu_features():
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
    return library


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(f"hf_efficient's C++ kernels are not used, torch's slower operators are: {reason}")
