"""Compiles every C++ library of this CPU's best tier that is missing, each once, one on each core.

Run before the tests: two workers that meet the same missing library would both compile it.
"""

import concurrent.futures
import os

from hf_efficient.kernels.native import build, compiler, tiers


def main() -> None:
    """Nothing without a compiler. One that fails is named, and the tests run on torch's operators."""
    command = compiler.compiler()
    if command is None or tiers.tier() is tiers.TORCH:
        return
    variants = [(name, macros) for name, of_name in compiler.LIBRARIES.items() for macros in of_name]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [pool.submit(build.build, name, command, **macros) for name, macros in variants]
    print(*{str(each.exception()) for each in made if each.exception() is not None}, sep="\n", end="")


if __name__ == "__main__":
    main()
