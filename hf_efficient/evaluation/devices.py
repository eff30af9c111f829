"""Peak rates of devices: bandwidth, operations per second and memory, from data sheets or measured here."""

import time
from dataclasses import dataclass
from functools import partial

import torch

from hf_efficient.evaluation.environment import describe


MATRIX = 16384, 8192  # shape in float32: 0.5 GB, larger than any CPU's or GPU's cache
SQUARE = 1024  # rows and columns of the matrix products that are timed on a CPU; 8 times as many on a GPU


@dataclass(frozen=True)
class Device:
    """The rates of a device."""

    name: str
    kind: str  # "cpu" or "accelerator"
    memory_bytes: int | None  # None where machines of this name differ
    bandwidth: float  # of its memory, bytes per second
    operations: dict[str, float]  # dtype of the inputs -> multiplications and additions per second in dense products
    source: str  # where the figures come from

    def rate(self, dtype: str, fallback: str) -> float:
        """Operations per second on inputs of `dtype`, else of `fallback`, else of float32: the first that it has."""
        return next(self.operations[name] for name in (dtype, fallback, "float32") if name in self.operations)


def _accelerator(name, gigabytes, bandwidth, float32, bfloat16, int8, fp8, source) -> Device:
    """bandwidth in GB/s, operations in TFLOP/s or TOP/s; fp8 is None where the device has none."""
    operations = {"float32": float32, "bfloat16": bfloat16, "float16": bfloat16, "int8": int8, "fp8": fp8}
    operations = {dtype: rate * 1e12 for dtype, rate in operations.items() if rate}
    return Device(name, "accelerator", int(gigabytes * 1e9), bandwidth * 1e9, operations, source)


def _laptop(name, bandwidth, float32, bfloat16, source) -> Device:
    """bandwidth in GB/s; float32 in GFLOP/s: cores x floats in two FMA registers x 2 x highest clock in GHz; bfloat16
    as a multiple of float32; int8 (VNNI) is four times as fast."""
    operations = {"float32": float32 * 1e9, "bfloat16": bfloat16 * float32 * 1e9, "int8": 4 * float32 * 1e9}
    return Device(name, "cpu", None, bandwidth * 1e9, operations, source)


DEVICES = {
    device.name: device
    for device in (
        _accelerator("h100", 80, 3350, 67, 989.4, 1978.9, 1978.9, "NVIDIA H100 SXM5 data sheet, without sparsity"),
        _accelerator("h200", 141, 4800, 67, 989.4, 1978.9, 1978.9, "NVIDIA H200 SXM data sheet, without sparsity"),
        _accelerator("a100", 80, 2039, 19.5, 312, 624, None, "NVIDIA A100 80GB SXM data sheet, without sparsity"),
        _accelerator("l4", 24, 300, 30.3, 121, 242.5, 242.5, "NVIDIA L4 data sheet, half of its figures with sparsity"),
        _accelerator(
            "rtx4090", 24, 1008, 82.6, 165.2, 660.6, 330.3, "NVIDIA Ada whitepaper, sums in float32, without sparsity"
        ),
        _accelerator("mi300x", 192, 5300, 163.4, 1307.4, 2614.9, 2614.9, "AMD Instinct MI300X data sheet, dense"),
        _laptop(
            "ryzen-7840u",
            120,
            8 * 32 * 5.1,
            2,
            "AMD: 8 Zen 4 cores to 5.1 GHz, LPDDR5X-7500 of 128 bits; AVX512_BF16 counted twice",
        ),
        _laptop(
            "core-ultra-155h",
            119.5,
            6 * 32 * 4.8 + 8 * 16 * 3.8,
            1,
            "Intel: 6 P-cores to 4.8 GHz, 8 E-cores to 3.8 GHz, LPDDR5X-7467 of 128 bits",
        ),
    )
}


def find_device(name: str) -> Device:
    """The device `name` of the table (case, spaces, `-` and `_` do not count); "measured" measures this machine.

    Raises ValueError for any other name."""
    if not isinstance(name, str):
        raise ValueError(f"device={name!r}: must be a Device, 'measured' or one of {', '.join(DEVICES)}")

    def plain(text: str) -> str:
        return "".join(character for character in text.lower() if character.isalnum())

    if plain(name) == "measured":
        return measure_device()
    for known, device in DEVICES.items():
        if plain(known) == plain(name):
            return device
    raise ValueError(f"device={name!r} is not known: it must be 'measured' or one of {', '.join(DEVICES)}")


def measure_device(seconds: float = 1.0) -> Device:
    """The rates of this machine, or of its GPU, as the best of several runs; each rate takes about `seconds`.

    Bandwidth is that of matrix-vector products with a matrix that no cache holds, operations are those of square
    products of each dtype.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    hardware = describe()["hardware"]
    rows, columns = MATRIX
    matrix = torch.ones(rows, columns, device=device, dtype=torch.float32)
    vector = matrix.new_ones(columns)
    bandwidth = matrix.nbytes / _best(partial(torch.mv, matrix, vector), seconds, is_gpu)
    del matrix
    size, operations = SQUARE * (8 if is_gpu else 1), {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        a = torch.ones(size, size, device=device, dtype=dtype)
        product = torch._int_mm if dtype is torch.int8 else torch.mm
        rate = 2 * size**3 / _best(partial(product, a, a), seconds, is_gpu)
        operations[str(dtype).removeprefix("torch.")] = rate
    return Device(
        hardware["gpu"] or hardware["cpu"],
        "accelerator" if is_gpu else "cpu",
        torch.cuda.get_device_properties(device).total_memory if is_gpu else available_memory(),
        bandwidth,
        operations,
        f"measured here, {hardware['threads']} threads",
    )


def available_memory() -> int:
    """Bytes of memory that this process may still allocate, by the system and its control group."""
    import psutil

    free = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as most, open(used) as now:
                free = min(free, int(most.read()) - int(now.read()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return max(free, 0)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate on `device`, a CPU or CUDA one."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def _best(run, seconds: float, synchronize: bool) -> float:
    """The shortest time of `run` over about `seconds` and at least three runs, after one that is not counted."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        if synchronize:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if synchronize:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
