"""Compiles the C++ libraries into a wheel for this platform. setup.cfg names these commands of setuptools.

    HF_EFFICIENT_PREBUILD=all python -m build --wheel           # every tier of the compiler's architecture
    HF_EFFICIENT_PREBUILD=avx2,bf16 python -m build --wheel     # these tiers
    CXX=aarch64-linux-gnu-g++ HF_EFFICIENT_PREBUILD=all python -m build --wheel     # for another architecture

Without the variable a wheel is the same for all platforms and has no libraries: they are compiled where they are used.
"""

import concurrent.futures
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


VARIABLE = "HF_EFFICIENT_PREBUILD"  # environment variable
# The wheel brings no C++ library; functions of OpenMP are those of the runtime that torch has loaded.
LINKED = (
    *("-s", "-static-libgcc", "-static-libstdc++", "-Wl,--exclude-libs,ALL"),
    *("-Wl,-Bstatic", "-lstdc++", "-Wl,-Bdynamic"),  # gcc, which may stand in $CXX, does not link it by itself
)


def _sibling(name: str):
    """A module of this folder, without importing the package, which needs torch."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def machine(command: list[str]) -> str:
    """The architecture that a compiler is for, by the name that `platform.machine` gives it."""
    asked = [*command, "-dumpmachine"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.partition("-")[0]


def jobs() -> list[tuple[Path, list[str]]]:
    """(file in the source tree, command) of each library to compile; none where nothing is prebuilt.

    Raises:
        SystemExit: the variable names no tier of the compiler's architecture, or libraries cannot be compiled here.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return []
    compiler, tiers = _sibling("compiler"), _sibling("tiers")
    command = compiler.compiler()
    if command is None or sys.platform != "linux":
        sys.exit(f"{VARIABLE}={asked} needs Linux and a C++ compiler")
    known = {tier.name: tier for tier in tiers.of_machine(machine(command))}
    names = list(known) if asked == "all" else asked.split(",")
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{VARIABLE}={asked}: {unknown[0]!r} is not among {', '.join(['all', *known])}")
    made = []
    for tier in map(known.get, names):
        for name, variants in compiler.LIBRARIES.items():
            for definitions in variants:
                arguments = compiler.arguments(name, tier.flags, definitions)
                made.append((compiler.prebuilt(name, tier.name, definitions), [*command, *arguments, *LINKED]))
    return made


class BuildPy(build_py):
    """Puts the libraries beside the modules."""

    def run(self):
        super().run()
        if self.editable_mode or not jobs():
            return
        folder = Path(self.build_lib, "hf_efficient", "kernels", "native", "prebuilt")
        folder.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for done in pool.map(lambda job: self._compile(folder / job[0].name, job[1]), jobs()):
                print(f"compiled {done}")

    @staticmethod
    def _compile(library: Path, command: list[str]) -> str:
        subprocess.run([*command, "-o", str(library)], check=True)
        return library.name


class BdistWheel(bdist_wheel):
    """Names the platform where libraries are compiled: any Python 3, and Linux with this glibc or a newer one."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not jobs()

    def get_tag(self):
        if self.root_is_pure:
            return super().get_tag()
        glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
        command = _sibling("compiler").compiler()
        return "py3", "none", f"manylinux_{glibc}_{machine(command)}"
