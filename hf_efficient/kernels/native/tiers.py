"""The instruction sets that the C++ kernels are compiled for, slowest first. The best one of this CPU is taken.

`$HF_EFFICIENT_CPU` names another one, for tests, benchmarks and reports of errors: `torch` is no C++ kernel at all.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


VARIABLE = "HF_EFFICIENT_CPU"  # environment variable


class Tier(NamedTuple):
    """features: what the CPU must have, by Linux' names. flags: of the compiler, that allow just these instructions.
    machines: the architectures that it is for, by the names that `platform.machine` gives them."""

    name: str
    features: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


def _extended(tier: Tier, name: str, features: str) -> Tier:
    """`tier` with further features, which compilers call almost the same."""
    flags = (f"-m{feature.replace('_', '-' if feature[:4] == 'amx_' else '')}" for feature in features.split())
    return Tier(name, tier.features.union(features.split()), (*tier.flags, *flags), ("x86_64", "AMD64"))


TORCH = Tier("torch")
AVX2 = _extended(TORCH, "avx2", "avx2 fma f16c bmi2 popcnt")
AVX_VNNI = _extended(AVX2, "avx_vnni", "avx_vnni")
AVX512 = _extended(AVX2, "avx512", "avx512f avx512bw avx512vl avx512dq")
VNNI = _extended(AVX512, "vnni", "avx512_vnni")
BF16 = _extended(VNNI, "bf16", "avx512_bf16 avx512vbmi avx512_vbmi2")
AMX = _extended(BF16, "amx", "amx_tile amx_int8 amx_bf16")
NEON = Tier("neon", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",), ("aarch64", "arm64"))
NEON_BF16 = NEON._replace(
    name="neon_bf16", features=NEON.features | {"bf16", "i8mm"}, flags=("-march=armv8.2-a+dotprod+bf16+i8mm",)
)
TIERS = {tier.name: tier for tier in (TORCH, AVX2, AVX_VNNI, AVX512, VNNI, BF16, AMX, NEON, NEON_BF16)}

_OF_MACOS = {"FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm"}  # its names of features


def of_machine(machine: str) -> list[Tier]:
    """The tiers that are compiled for an architecture under the name that `platform.machine` gives it."""
    return [tier for tier in TIERS.values() if machine in tier.machines]


@functools.cache
def cpu_features() -> frozenset[str]:
    """The instruction sets of the CPU under Linux' names; of Apple's own CPUs what tiers need; else none."""
    if sys.platform == "darwin":
        return _features_of_macos()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(word for line in lines if line.startswith(("flags", "Features")) for word in line.split()[2:])


def _features_of_macos() -> frozenset[str]:
    command = ["sysctl", "hw.optional.arm"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return frozenset()
    present = {line.split(":")[0].rpartition(".")[2] for line in lines if line.endswith(": 1")}
    return frozenset(name for feature, name in _OF_MACOS.items() if feature in present)


def present(features: frozenset[str] | None = None) -> list[str]:
    """The names of the tiers that a CPU with these features (None: this one) can run."""
    features = cpu_features() if features is None else features
    return [name for name, tier in TIERS.items() if tier.features <= features]


def tier() -> Tier:
    """The tier of `$HF_EFFICIENT_CPU`, else the best one that this CPU can run.

    Raises:
        ValueError: the variable names no tier, or one that this CPU cannot run.
    """
    return _chosen(os.environ.get(VARIABLE), cpu_features())


@functools.cache
def _chosen(name: str | None, features: frozenset[str]) -> Tier:
    names = present(features)
    if not name:
        return TIERS[names[-1]]
    if name not in names:
        lacks = f", and lacks {', '.join(sorted(TIERS[name].features - features))}" if name in TIERS else ""
        raise ValueError(f"${VARIABLE} is {name!r}: this CPU runs {', '.join(names)}{lacks}")
    return TIERS[name]


def once_a_tier(function):
    """`functools.cache` of a function that depends on the tier, too."""
    cached = functools.cache(lambda _, *args, **kwargs: function(*args, **kwargs))

    @functools.wraps(function)
    def call(*args, **kwargs):
        return cached(tier(), *args, **kwargs)

    call.cache_clear = cached.cache_clear
    return call
