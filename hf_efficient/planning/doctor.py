"""What this machine can do for hf_efficient, and what is off: the findings of `hf-efficient doctor`.

Each check is a generator of findings.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from hf_efficient import methods
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.evaluation.devices import available_memory
from hf_efficient.kernels.native import build as cpu_build
from hf_efficient.kernels.native import compiler as cpu_compiler
from hf_efficient.kernels.native import tiers
from hf_efficient.kernels.native.cpu_limits import (
    THREAD_VARIABLES,
    cpu_quota,
    performance_cores,
    recommended_threads,
    usable_cpus,
)


GIGABYTE = 10**9
LEAST_MEMORY, LEAST_DISK = 2 * GIGABYTE, 5 * GIGABYTE  # with less even a small model or its download may fail
MOST_ERROR = 0.02  # relative RMS: rounding to bfloat16 gives about 0.003, a wrong kernel about 1
OPTIONAL = {
    "matplotlib": "plots of run and bench (extra demo)",
    "jinja2": "model cards (extra demo)",
    "gguf": "GGUF files, and the sample model of demo (extra demo)",
    "datasets": "calibration with a dataset of the Hub",
    "peft": "adapters (extra peft)",
    "optimum": "optimum-cli (extra optimum)",
    "bitsandbytes": "the optimizer adamw_8bit (extra bitsandbytes)",
    "lm_eval": "tasks of evaluate (extra evaluate)",
    "shtab": "completion of the command line (extra cli)",
}
VARIABLES = {
    "HF_HUB_OFFLINE": "nothing is downloaded",
    "TRANSFORMERS_OFFLINE": "nothing is downloaded",
    "HF_HOME": "where models and compiled kernels are kept",
    "HF_HUB_CACHE": "where models are kept",
    "XDG_CACHE_HOME": "where the sample model is kept",
    "OMP_NUM_THREADS": "threads of a CPU",
    "MKL_NUM_THREADS": "threads of MKL's products",
    "GOMP_CPU_AFFINITY": "which CPUs threads run on",
    "KMP_AFFINITY": "which CPUs threads run on",
    "CXX": "the C++ compiler of the CPU kernels",
    "HF_EFFICIENT_CPU": "the instructions of the CPU kernels",
    "HF_EFFICIENT_LAYOUT_CACHE": "where layouts of saved checkpoints are kept",
    "CUDA_VISIBLE_DEVICES": "which GPUs are seen",
    "HIP_VISIBLE_DEVICES": "which GPUs are seen",
    "TRITON_CACHE_DIR": "where compiled Triton kernels are kept",
    "FLASH_PAGED_DEBUG": "attention checks its arguments, and waits for the GPU to do so",
    "LD_PRELOAD": "libraries put before all others",
}
HARMFUL = {  # variable -> value (None: any) -> what it does
    "TRITON_INTERPRET": ("1", "Triton kernels run in Python, thousands of times slower"),
    "ATEN_CPU_CAPABILITY": (None, "torch's CPU operators use fewer instructions than the CPU has"),
    "ONEDNN_MAX_CPU_ISA": (None, "oneDNN's products use fewer instructions than the CPU has"),
    "TORCHDYNAMO_DISABLE": ("1", "torch.compile does nothing"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every GPU kernel is waited for"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    status: str  # "ok", "off" (works, but slower or with less than it could) or "broken"
    what: str
    why: str = ""  # what it means for models; empty where there is nothing to do
    do: str = ""  # what helps; empty likewise


def examine() -> list[Finding]:
    """Every finding on this machine, in the order of `CHECKS`. A check that raises is a finding, too."""
    findings = []
    for check in CHECKS:
        try:
            findings += [*check()]
        except Exception as error:
            name, what = check.__name__.removeprefix("check_").replace("_", " "), f"{type(error).__name__}: {error}"
            findings.append(Finding(name, "broken", what, "this check itself failed", "report it with this line"))
    return findings


def check_versions() -> Iterator[Finding]:
    """Every required package against its supported range."""
    for line in importlib.metadata.requires("hf_efficient") or ():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version, supported = installed_version(needed.name), str(needed.specifier) or "any version"
        help = f"pip install '{needed.name}{needed.specifier}'"
        if version is None:
            yield Finding(needed.name, "broken", "not installed", "hf_efficient requires it", help)
        elif not needed.specifier.contains(version, prereleases=True):
            why = f"supported is {supported}: what it touches in the package may have moved"
            yield Finding(needed.name, "broken", version, why, help)
        else:
            yield Finding(needed.name, "ok", f"{version} ({supported})")


def installed_version(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_optional_packages() -> Iterator[Finding]:
    """Packages of optional features; their absence is no fault."""
    versions = {name: installed_version(name) for name in OPTIONAL}
    present = [f"{name} {version}" for name, version in versions.items() if version]
    yield Finding("optional packages", "ok", ", ".join(present) or "none")
    absent = [name for name, version in versions.items() if not version]
    yield from (Finding(name, "ok", "not installed", f"needed for {OPTIONAL[name]}") for name in absent)


def check_registration() -> Iterator[Finding]:
    """Whether the quantizers and the attention can be registered with transformers."""
    import hf_efficient

    try:
        hf_efficient.register()
    except Exception as error:
        why = "from_pretrained() does not know this package's configs"
        help = "install a supported transformers, see above"
        yield Finding("registration", "broken", f"{type(error).__name__}: {error}", why, help)
    else:
        yield Finding("registration", "ok", "quantizers and attention are registered with transformers")


def check_cpu() -> Iterator[Finding]:
    """The instructions of the CPU."""
    features = tiers.cpu_features()
    has = {
        "AVX2": "avx2",
        "AVX-VNNI": "avx_vnni",
        "AVX-512": "avx512f",
        "AVX-512 bf16": "avx512_bf16",
        "AVX-512 VNNI": "avx512_vnni",
        "AMX": "amx_int8",
        "NEON": "asimd",
        "NEON bf16": "bf16",
        "NEON dot products": "asimddp",
    }
    listed = ", ".join(name for name, feature in has.items() if feature in features) or "unknown"
    what = f"{platform.machine()}: {listed}; torch uses {torch.backends.cpu.get_cpu_capability()}"
    try:
        tier, best = tiers.tier(), tiers.present()[-1]
    except ValueError as error:
        help = f"unset {tiers.VARIABLE}"
        yield Finding("cpu", "broken", what, str(error), help)
        return
    what += f"; C++ kernels: {tier.name}"
    if tier.name != best:
        why = f"{tiers.VARIABLE}={tier.name} asks for slower kernels than this CPU can run"
        yield Finding("cpu", "off", what, why, f"unset it for {best}")
    elif tier is tiers.TORCH:
        why = "there are no C++ kernels for this CPU: torch's operators are used, which are slower"
        yield Finding("cpu", "off", what, why, "an x86 CPU with AVX2, an ARM CPU with dot products, or a GPU")
    elif missing := sorted(tiers.of_machine(tier.machines[0])[-1].features - features):
        yield Finding("cpu", "ok", f"{what}; faster ones need {', '.join(missing)}")
    else:
        yield Finding("cpu", "ok", what)


def check_threads() -> Iterator[Finding]:
    """The number of torch's threads against the CPUs that this process may use."""
    threads, best, quota = torch.get_num_threads(), recommended_threads(), cpu_quota()
    what = f"{threads} threads, {usable_cpus()} CPUs allowed, {performance_cores()} cores for performance"
    what += "" if quota is None else f", a quota of {quota:g} CPUs"
    ways = f"OMP_NUM_THREADS={best}, or torch.set_num_threads({best})"
    if threads > best and any(os.environ.get(name) for name in THREAD_VARIABLES):
        why = "threads wait for each other's CPU: often several times slower than with fewer"
        yield Finding("threads", "off", what, why, ways)
    elif threads > best:
        yield Finding("threads", "ok", f"{what}; the C++ kernels lower them to {best}")
    elif threads < best:
        yield Finding("threads", "off", what, f"{best - threads} of {best} cores are not used", ways)
    else:
        yield Finding("threads", "ok", what)


def check_cpu_kernels() -> Iterator[Finding]:
    """Whether the C++ kernels can be compiled, or are there already."""
    name, slower = "C++ kernels", "torch's operators are used, which are slower"
    command, given = cpu_compiler.compiler(), os.environ.get("CXX")
    with contextlib.suppress(ValueError):  # which `check_cpu` tells
        tier = tiers.tier().name
        if tier == "torch":
            yield Finding(name, "ok", "not for this CPU" if tiers.present() == ["torch"] else "switched off")
        elif cpu_compiler.prebuilt("replay", tier, {}).exists():
            yield Finding(name, "ok", f"{tier}, from the wheel: no compiler is needed")
        elif command is None and given:
            yield Finding(name, "broken", f"CXX={given} is no program", slower, "unset CXX, or name a compiler")
        elif command is None:
            yield Finding(name, "off", "no C++ compiler", slower, "install g++ or clang++, or set CXX")
        else:
            yield _compile(name, command, slower)


def _compile(name: str, command: list[str], slower: str) -> Finding:
    """The finding of compiling one library with the compiler `command`."""
    folder = Path(constants.HF_HOME) / "hf_efficient" / "cpu"
    before = set(folder.glob("*.so")) if folder.is_dir() else set()
    try:
        library = cpu_build.build("replay", command)
    except (OSError, RuntimeError) as error:
        help = "try another compiler with CXX=..., then run this again"
        return Finding(name, "broken", f"{command[0]} failed: {str(error)[-300:]}", slower, help)
    state = "compiled before" if library in before else "compiled now"
    return Finding(
        name, "ok", f"{tiers.tier().name}, by {command[0]}; {state}, {len(before | {library})} libraries in {folder}"
    )


def check_gpu() -> Iterator[Finding]:
    """The GPUs, and which kernels they run."""
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        what = f"{torch.cuda.get_device_name()}, but no triton"
        yield Finding("gpu", "broken", what, "this package's GPU kernels cannot be compiled", "pip install triton")
    elif torch.cuda.is_available():
        yield from map(_examine_gpu, range(torch.cuda.device_count()))
    elif has_nvidia_driver() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        what = f"there is an NVIDIA driver, but torch {torch.__version__} ({build}) sees no GPU"
        yield Finding(
            "gpu", "broken", what, "models run on the CPU", "install torch for the driver's CUDA: pytorch.org"
        )
    else:
        yield Finding("gpu", "ok", "none: models run on the CPU")


def _examine_gpu(index: int) -> Finding:
    name, properties = f"gpu {index}", torch.cuda.get_device_properties(index)
    what = f"{properties.name}, {properties.total_memory / GIGABYTE:.0f} GB"
    if torch.version.hip:
        return Finding(name, "ok", f"{what}, ROCm {torch.version.hip}: Triton kernels")
    capability = properties.major, properties.minor
    what += f", compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        why = "the Triton kernels want bfloat16 and asynchronous copies, of compute capability 8.0"
        return Finding(name, "off", what, why, "float16 models may run, slowly; use an Ampere GPU or newer")
    kernels = ["attention and linear kernels", "fp8 products"][: 1 + (capability >= (8, 9))]
    kernels += ["tiles by the tensor memory accelerator"] if capability[0] in (9, 10) else []
    return Finding(name, "ok", f"{what}: {', '.join(kernels)}")


def has_nvidia_driver() -> bool:
    """Whether the kernel has NVIDIA's driver loaded."""
    return Path("/proc/driver/nvidia/version").exists()


def check_memory() -> Iterator[Finding]:
    """Memory that this process may still take."""
    free = available_memory()
    what = f"{free / GIGABYTE:.1f} GB available"
    if free < LEAST_MEMORY:
        why = "a model that does not fit ends the process without a message"
        yield Finding(
            "memory", "off", what, why, "close other programs, raise the control group's limit, or fewer bits"
        )
    else:
        yield Finding("memory", "ok", what)


def check_disk() -> Iterator[Finding]:
    """Whether models and compiled kernels can be stored."""
    for name, folder in (("HF_HOME", Path(constants.HF_HOME)), ("model cache", Path(constants.HF_HUB_CACHE))):
        why_not = why_unwritable(folder)
        if why_not:
            what = f"{folder} cannot be written: {why_not}"
            why = "downloads fail, and every process compiles the kernels anew"
            yield Finding(name, "broken", what, why, "set HF_HOME to a folder that can")
            continue
        free = shutil.disk_usage(existing_parent(folder)).free
        what = f"{folder}, {free / GIGABYTE:.0f} GB free"
        if free < LEAST_DISK:
            yield Finding(name, "off", what, "downloads may fail halfway", "free some, or set HF_HOME to another disk")
        else:
            yield Finding(name, "ok", what)


def existing_parent(folder: Path) -> Path:
    """`folder`, or the nearest folder around it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def why_unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder` (or in its nearest existing parent); None where one can."""
    try:
        with tempfile.TemporaryFile(dir=existing_parent(folder)):
            return None
    except OSError as error:
        return error.strerror or str(error)


def check_environment() -> Iterator[Finding]:
    """Environment variables that change what happens."""
    for name, meaning in VARIABLES.items():
        if name in os.environ:
            yield Finding(name, "ok", f"{os.environ[name]!r}: {meaning}")
    for name, (value, harm) in HARMFUL.items():
        if os.environ.get(name) is not None and value in (None, os.environ[name]):
            yield Finding(name, "off", repr(os.environ[name]), harm, f"unset {name}, unless you mean it")


def check_product() -> Iterator[Finding]:
    """One product with a 4-bit weight by the layout that models use on this machine, against float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 256, generator=generator).to(device, torch.bfloat16) for rows in (128, 4))
    format = WeightOnlyConfig(bits=4, group_size=64).format()
    tensors = methods.quantize(weight, format, "rtn")
    expected = x.double() @ format.dequantize(tensors, 256, torch.float64).t()
    layout = format.layout(tensors, 256, torch.bfloat16)
    actual = layout.matmul(x).double()
    error = ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()
    what = f"int4 on {device} by {type(layout).__name__}: relative error {error:.2g}"
    if not error <= MOST_ERROR:
        why = f"more than {MOST_ERROR} of rounding: models would answer nonsense"
        help = "remove the compiled kernels in HF_HOME/hf_efficient; if it stays, report it with this output"
        yield Finding("self-test", "broken", what, why, help)
    else:
        yield Finding("self-test", "ok", what)


CHECKS = (
    *(check_versions, check_registration, check_optional_packages, check_cpu, check_threads, check_cpu_kernels),
    *(check_gpu, check_memory, check_disk, check_environment, check_product),
)
