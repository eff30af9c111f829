"""The C++ kernels of another architecture: cross-compiled here, run by qemu, and called by this process as if they were
its own. `make test-aarch64` runs their numeric tests in this way.

The emulator reads and writes this process' memory through /proc, page by page as the kernels touch it
(`emulated.cpp`), so that every function works that takes addresses.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME

from hf_efficient.files import atomic_write
from hf_efficient.kernels.native import build, compiler, structs, tiers


ASKED = bool(os.environ.get("EMULATE_AARCH64"))  # to run tiers of ARM here
COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
CPUS = {"neon": "neoverse-n1", "neon_bf16": "max"}  # tier -> a CPU that has its instructions, and no later ones
VNNI_OF_AVX512 = (*tiers.AVX2.flags, "-DVNNI_OF_AVX512")  # flags: see common/vectors_avx2.h
_FAR = 1 << 34  # bytes between what this process has mapped and what the emulator has: neither grows into the other


def why_not() -> str | None:
    """Why tiers of ARM cannot be emulated; None where they can."""
    if not ASKED:
        return "`make test-aarch64` emulates it"
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}: apt-get install g++-aarch64-linux-gnu qemu-user" if missing else None


def use(tier: str, monkeypatch) -> None:
    """Until the test is over, kernels are those of `tier`, which is one of `CPUS`."""
    monkeypatch.setenv(tiers.VARIABLE, tier)
    monkeypatch.setattr(tiers, "cpu_features", lambda: tiers.TIERS[tier].features)
    monkeypatch.setattr(build, "_prebuilt", lambda name, definitions: None)
    monkeypatch.setattr(build, "_compiled", lambda name, definitions: Library(tier, name, definitions))


def use_avx_vnni(monkeypatch) -> None:
    """Until the test is over, kernels are those of the tier "avx_vnni", on a CPU that has its dot products in the
    encoding of AVX-512 alone: they differ in nothing else (`test_tiers.py` compares their instructions)."""
    tier, features = tiers.AVX_VNNI, tiers.cpu_features()
    monkeypatch.setenv(tiers.VARIABLE, tier.name)
    monkeypatch.setitem(tiers.TIERS, tier.name, tier._replace(flags=VNNI_OF_AVX512))
    monkeypatch.setattr(tiers, "cpu_features", lambda: features | tier.features)


def _compiled(name: str, arguments: list[str], sources: bytes) -> Path:
    """The path of a program or library, compiled where it is missing."""
    program = shutil.which(COMPILER)
    checkout = str(Path(__file__).parents[1])
    asked = [argument.replace(checkout, "") for argument in arguments]  # every checkout asks for the same
    key = hashlib.sha256(repr((asked, os.stat(program).st_mtime_ns, sources)).encode()).hexdigest()[:24]
    path = Path(HF_HOME) / "hf_efficient" / "cpu" / f"{name}-aarch64-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            subprocess.run([program, *arguments, "-o", str(partial)], check=True)
    return path


class Emulator:
    """A process of qemu that calls functions."""

    def __init__(self, cpu: str):
        source = Path(__file__).with_name("emulated.cpp")
        arguments = ["-O2", "-pie", "-fPIE", "-rdynamic", "-w", str(source), "-ldl", "-fopenmp"]
        driver = _compiled("driver", arguments, source.read_bytes())
        command = [EMULATOR, "-L", ROOT, "-cpu", cpu, str(driver), str(os.getpid())]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        for _ in range(50):  # addresses are drawn anew each time
            self.process = subprocess.Popen(command, env=environment, **pipes)
            self.ask("symbol 0 main")
            if self._is_far():
                break
            self.process.kill()
        else:
            raise RuntimeError("the emulator never has addresses that are free here")
        atexit.register(self.process.kill)

    def _is_far(self) -> bool:
        own, others = (_mapped(process) for process in ("self", self.process.pid))
        return all(first > end + _FAR or last < start - _FAR for first, last in own for start, end in others)

    def ask(self, question: str) -> str:
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise RuntimeError(f"emulated {question[:100]!r}: {answer or 'the process ended'}")
        return answer


def _mapped(process) -> list[tuple[int, int]]:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if not line.endswith(("[stack]", "[vvar]", "[vdso]", "l]"))]
    return [(int(first, 16), int(last, 16)) for first, last in ranges]


_emulator = functools.cache(Emulator)


class Library:
    """As `ctypes.CDLL`, with functions of integers and addresses."""

    def __init__(self, tier: str, name: str, definitions: dict[str, int], emulator: Emulator | None = None):
        arguments = [*compiler.arguments(name, tiers.TIERS[tier].flags, definitions), "-fopenmp"]
        path = _compiled(f"{name}-{tier}", arguments, compiler.sources_hash().encode())
        self._name, self._emulator = str(path), emulator or _emulator(CPUS[tier])
        self._handle = self._emulator.ask(f"open {path}")

    def __getattr__(self, name: str):
        address = int(self._emulator.ask(f"symbol {self._handle} {name}"), 16)
        if not address:
            raise AttributeError(name)
        function = (_Layouts if name == "hf_layouts" else Function)(address)
        function.emulator = self._emulator
        setattr(self, name, function)
        return function


class Function(ctypes._CFuncPtr):
    """An emulated function, whose address others of the same emulator can call."""

    _flags_, _restype_ = ctypes._FUNCFLAG_CDECL, ctypes.c_int

    def __call__(self, *arguments):
        values = [ctypes.cast(self, ctypes.c_void_p).value, torch.get_num_threads(), *map(int, arguments)]
        values += [0] * (8 - len(values))
        answer = self.emulator.ask("call " + " ".join(f"{value % 2**64:x}" for value in values))
        if self.restype is None:
            return None
        return self.restype(int(answer, 16)).value


class _Layouts(Function):
    _flags_, _restype_ = Function._flags_, ctypes.POINTER(structs._LayoutRow)

    def __call__(self):
        words = self.emulator.ask(f"layouts {ctypes.cast(self, ctypes.c_void_p).value:x}").split()
        rows = [(words[i].encode(), int(words[i + 1]), int(words[i + 2])) for i in range(0, len(words), 3)]
        return (structs._LayoutRow * (len(rows) + 1))(*rows)
