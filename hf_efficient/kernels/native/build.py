"""Loads the C++ kernels (`<library>/<library>.cpp` in this folder), compiled on the machine that runs them where the
wheel brings none for its tier.

A library is compiled when a layer first needs it and stored in `$HF_HOME/hf_efficient/cpu` under a hash of the sources,
the compiler and its flags, among them those of the tier (`tiers.py`): later processes of any environment only load it.
It uses the threads of the OpenMP runtime that torch has loaded. Without a compiler (`$CXX`, else g++, c++ or clang++)
callers use torch's operators, and one warning says so.

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
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from hf_efficient.files import atomic_write, why_not_writable
from hf_efficient.kernels.native import compiler, structs, tiers
from hf_efficient.kernels.native.cpu_limits import limit_threads
from hf_efficient.kernels.native.openmp import openmp_runtime


logger = logging.getLogger(__name__)

# g++ links it by itself; gcc does not, which PEFT's BOFT leaves behind in $CXX
LIBRARIES = ("-lc++" if sys.platform == "darwin" else "-lstdc++",)
SANITIZE = "HF_EFFICIENT_SANITIZE"  # environment variable


def sanitizer_flags() -> list[str]:
    """The compiler's flags for `$HF_EFFICIENT_SANITIZE`; none where that is empty or not set.

    Null pointers end a process anyway, sizes of objects and where pointers lead AddressSanitizer knows better, and no
    class has virtual functions: compiling takes a third less without checks of these.
    """
    names = os.environ.get(SANITIZE)
    left_out = "-fno-sanitize=null,object-size,pointer-overflow,vptr"
    return ["-O1", f"-fsanitize={names}", left_out, "-fno-sanitize-recover=all", "-g1"] if names else []


def build(name: str, command: list[str], **definitions: int) -> Path:
    """The path of the library of `<name>/<name>.cpp` for the tier, compiled by `command` where it is missing.

    Raises:
        RuntimeError: the compiler fails (with its output), or torch has loaded no OpenMP runtime.
    """
    program = Path(command[0]).resolve()
    command = [*command, *compiler.arguments(name, tiers.tier().flags, definitions), *sanitizer_flags()]
    runtime = openmp_runtime()
    if runtime is None:
        raise RuntimeError("torch has loaded no OpenMP runtime")
    asked = [argument.replace(str(compiler.SOURCES), "") for argument in command]  # the same in every environment
    stamp = asked, LIBRARIES, program.stat().st_mtime_ns, Path(runtime).name, compiler.sources_hash()
    key = hashlib.sha256(repr(stamp).encode()).hexdigest()[:24]
    library = Path(HF_HOME) / "hf_efficient" / "cpu" / f"{name}-{platform.machine()}-{key}.so"
    if _is_whole(library):
        return library
    if why_not_writable(library):  # for this process only
        library = Path(tempfile.mkdtemp()) / library.name
        atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    _say_once(f"hf_efficient compiles its C++ kernels for this CPU ({tiers.tier().name}), once: some seconds each")
    with atomic_write(library) as partial:  # several processes may compile it at once
        command = [*command, "-o", str(partial), runtime, *LIBRARIES]
        # a preloaded sanitizer is not meant for the compiler, which takes ten times as long with it
        environment = {**os.environ, "LD_PRELOAD": ""} if os.environ.get(SANITIZE) else None
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
        if result.returncode or not partial.exists():
            raise RuntimeError(f"{shlex.join(command)}: {result.stderr[-2000:] or 'it wrote nothing'}")
        with open(partial, "rb") as file:
            os.fsync(file.fileno())  # renamed before its content is on disk, it could be cut after a power cut
    return library


def _is_whole(library: Path) -> bool:
    """Whether a library is there, and no end of it is missing, where it is an ELF file: its section headers come last.
    A process that loads a cut one is ended by the system (SIGBUS)."""
    try:
        with open(library, "rb") as file:
            header, end = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:  # missing, or in a folder that may not be read
        return False
    if not header.startswith(b"\x7fELF"):
        return True  # loading it says what it is
    if len(header) < 64:
        return False
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return end >= start + size * count


@tiers.once_a_tier
def load(name: str, structures: tuple[type[ctypes.Structure], ...], **definitions: int) -> ctypes.CDLL | None:
    """The library of `<name>/<name>.cpp` with the macros `definitions`: the wheel's own, else compiled here.

    Returns None where torch's operators are to be used: that is the tier, there is no compiler, or it fails.

    Raises:
        ValueError: `$HF_EFFICIENT_CPU` names no tier of this CPU.
        LayoutMismatch: `structures`, the mirrors of all that the library exports, differ from it.
    """
    if tiers.tier() is tiers.TORCH:
        return None
    try:
        library = _prebuilt(name, definitions) or _compiled(name, definitions)
    except (OSError, RuntimeError, ValueError) as reason:
        _say_once(f"hf_efficient's C++ kernels are not used, torch's slower operators are: {reason}")
        return None
    structs.check(library, structures)
    limit_threads()
    return library


def _prebuilt(name: str, definitions: dict[str, int]) -> ctypes.CDLL | None:
    path, runtime = compiler.prebuilt(name, tiers.tier().name, definitions), openmp_runtime()
    if not path.exists() or runtime is None or os.environ.get(SANITIZE):
        return None
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # whose functions the library finds
    return ctypes.CDLL(str(path))


def _compiled(name: str, definitions: dict[str, int]) -> ctypes.CDLL:
    command = compiler.compiler()
    if command is None:
        given = os.environ.get("CXX")
        raise RuntimeError(f"$CXX is {given!r}, which is no program" if given else "no C++ compiler (g++, or $CXX)")
    library = build(name, command, **definitions)
    try:
        return ctypes.CDLL(str(library))
    except OSError as reason:  # a damaged file, or one of a system with another C library
        logger.warning(f"{library} cannot be loaded and is compiled anew: {reason}")
        library.unlink(missing_ok=True)  # another process may have been faster
        return ctypes.CDLL(str(build(name, command, **definitions)))


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
