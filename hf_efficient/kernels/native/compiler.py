"""The C++ libraries of the kernels, and the commands that compile them. Needs the standard library alone, since the
package's own build reads this file too (`prebuild.py`)."""

import functools
import hashlib
import os
import shlex
import shutil
from pathlib import Path


SOURCES = Path(__file__).parent
LIBRARIES = {  # library, compiled from <name>/<name>.cpp -> the macros of each of its variants
    "linear": tuple(
        {"BITS": bits, "KIND": kind} for kind in range(4) for bits in (2, 3, 4, 8) if bits == 8 or kind < 2
    ),
    "pages": tuple({"QUERY": number_type} for number_type in range(3)),
    "rounded": ({"BITS": 8}, {"BITS": 2}),
    "replay": ({},),
    "binary": ({},),
    "sparse": ({},),
    "contextual": ({},),
    "hadamard": ({},),
    "packing": ({},),
    "fake_quantize": ({},),
    "viterbi": ({},),
    "trellis": tuple({"HALF_BITS": count} for count in range(3, 11)),
}
FLAGS = ("-O2", "-std=c++17", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")  # besides those of the tier


def compiler() -> list[str] | None:
    """The command of the C++ compiler, None if there is none: `$CXX`, else g++, c++ or clang++."""
    for command in [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]:
        try:
            words = shlex.split(command)
        except ValueError:  # an open quotation
            words = []
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    return None


def arguments(name: str, tier_flags: tuple[str, ...], definitions: dict[str, int]) -> list[str]:
    """What the compiler is given to make a library, besides where it puts it and what it links."""
    macros = [f"-D{key}={value}" for key, value in definitions.items()]
    return [*FLAGS, *tier_flags, *macros, f"-I{SOURCES / 'common'}", str(SOURCES / name / f"{name}.cpp")]


@functools.cache
def sources_hash() -> str:
    """Of all C++ sources, in 16 hexadecimal digits."""
    key = hashlib.sha256()
    for path in sorted(path for path in SOURCES.glob("*/*") if path.suffix in (".cpp", ".h")):
        key.update(path.read_bytes())
    return key.hexdigest()[:16]


def prebuilt(name: str, tier: str, definitions: dict[str, int]) -> Path:
    """Where the wheel of a platform holds a library that was compiled from these very sources."""
    variant = "".join(f"-{key.lower()}{value}" for key, value in definitions.items())
    return SOURCES / "prebuilt" / f"{name}{variant}-{tier}-{sources_hash()}.so"
