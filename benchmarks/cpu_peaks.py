"""Billions of operations a second of the dot products of AVX-512 and of AMX in registers, by all threads: the ceiling
of products that wait for no memory. Other scripts report it beside what they measure; alone it prints it.

    python benchmarks/cpu_peaks.py [--threads 2]
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hf_efficient.kernels.native import compiler, tiers


# Kind -> the feature of the CPU, and the operations of a round of cpu_peaks.cpp: products and sums of all instructions.
KINDS = {
    "int8": ("avx512_vnni", 16 * 2 * 64),
    "bfloat16": ("avx512_bf16", 16 * 2 * 32),
    "amx_int8": ("amx_int8", 4 * 2 * 16 * 16 * 64),
    "amx_bfloat16": ("amx_bf16", 4 * 2 * 16 * 16 * 32),
}
FLAGS = ("-O2", "-march=native", "-shared", "-fPIC")
SECONDS, REPEATS = 0.1, 10  # of one measurement; how many


def dot_peaks(threads: int) -> dict[str, float]:
    """Kind -> GOP/s, a product and a sum being two operations: the best of REPEATS. Empty where there is no compiler,
    and without what the CPU lacks."""
    program, found = compiler.compiler(), {}
    kinds = [kind for kind, (feature, _) in KINDS.items() if feature in tiers.cpu_features()]
    if program is None or not kinds:
        return found
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        path = Path(folder) / "peaks.so"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([*program, *FLAGS, "-o", str(path), str(source)], check=True)
        library = ctypes.CDLL(str(path))
        for kind in kinds:
            function = getattr(library, kind)
            function.argtypes, function.restype = [ctypes.c_int64], None

            def run(rounds, function=function):
                start = time.perf_counter()
                list(pool.map(function, [rounds] * threads))
                return time.perf_counter() - start

            rounds = int(100_000 * SECONDS / run(100_000)) + 1
            best = min(run(rounds) for _ in range(REPEATS))
            found[kind] = threads * rounds * KINDS[kind][1] / best / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    for kind, peak in dot_peaks(parser.parse_args().threads).items():
        print(f"{kind}: {peak:,.0f} GOP/s")


if __name__ == "__main__":
    main()
