"""How many instructions of each kernel's inner loop fall on one number that it reads, from the machine code.

A budget is what the issue slots of an H200 allow while it reads memory at full speed, with room for the rest. `held` is
today's count, with 3 percent for other releases of the compiler: a test holds it, so that no change loses what was won.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import sass
import test_efficient_linear_aot
import test_efficient_linear_sparse24_aot
import test_efficient_linear_trellis_aot
import test_efficient_linear_w8a8_aot
import test_flash_paged_aot
import test_flash_paged_decode_aot
import torch
from aot import Compiled

from hf_efficient.kernels.efficient_linear import (
    launch_configs,
    sparse24,
    sparse24_packing,
    trellis,
    trellis_packing,
    w8a8_configs,
)
from hf_efficient.kernels.flash_paged import config


@dataclass(frozen=True)
class Case:
    """One kernel as it is launched.

    build: target -> the compiled kernel. per_loop: numbers that a program reads in one round of its loop. threads: of a
    program. Both may be functions of the target. unit: what is counted. budget, held: thread instructions a number on
    sm_90 (budget None: none was set). spilled: most loads and stores of spilled registers in a loop.
    """

    name: str
    build: Callable[[str], Compiled]
    per_loop: float
    threads: int
    unit: str
    budget: float | None
    held: tuple[float, float]
    is_masked: bool = False
    spilled: int = 0

    def loop(self, target: str) -> list[str]:
        found = sass.loops(self.compiled(target).machine_code)
        return found[-1] if self.is_masked else max(found, key=lambda names: sass.count(names, *sass.MATRIX))

    def instructions(self, target: str) -> float:
        """Thread instructions of the loop a number."""
        return len(self.loop(target)) * self.threads / self.per_loop

    def compiled(self, target: str) -> Compiled:
        return _compiled(self, target)


@functools.cache
def _compiled(case: Case, target: str) -> Compiled:
    return case.build(target)


def _decode(name: str | None, page: int, budget: float, held: tuple[float, float]) -> Case:
    """Of heads of 128 channels, four query heads a key head."""
    if name is None:
        tile = config.decode_config(torch.bfloat16, 128, 4, "nvidia")
        keys, warps = tile.block_n, tile.num_warps
    else:
        tile = config.codes_config(128, 4, test_flash_paged_decode_aot.BITS[name], page, "nvidia")
        keys, warps = tile.keys * tile.warps, tile.warps
    return Case(
        f"decode, {name or 'bf16'} KV, pages of {page}",
        lambda target: test_flash_paged_decode_aot.build(target, name, 128, page),
        keys * 2 * 128,
        32 * warps,
        "a cached number",
        budget,
        held,
        spilled=test_flash_paged_decode_aot.SPILLED.get(name, 0),
    )


def _weights(bits: int, tokens: int, budget: float | None, held: tuple[float, float]) -> Case:
    """Groups of 64 with zero points."""

    tile = launch_configs.choose_tile(tokens, False, bits)
    columns = 256 if bits == 3 else 128 * launch_configs.steps_a_round(tile.block_m, bits)

    return Case(
        f"W{bits}A16, up to {tokens} rows",
        lambda target: test_efficient_linear_aot.compile_linear(target, tokens, bits=bits),
        tile.block_n * columns,
        32 * tile.num_warps,
        "a weight",
        budget,
        held,
    )


def _w8a8(tokens: int, held: tuple[float, float]) -> Case:
    tile = w8a8_configs.choose_tile(tokens, False, True)
    return Case(
        f"W8A8 int8, {tokens} rows",
        lambda target: test_efficient_linear_w8a8_aot.compile_product(target, "int8", tokens),
        tile.block_n * 128,
        32 * tile.num_warps,
        "a weight",
        None,
        held,
    )


def _sparse24(four_bits: bool, held: tuple[float, float]) -> Case:
    """A weight of the dense matrix, of which half are stored; 4 bits with zero points in groups of 128."""
    tile = sparse24.TILES[16]
    return Case(
        f"2:4 sparse {'int4' if four_bits else 'bf16'}, up to 16 rows",
        lambda target: test_efficient_linear_sparse24_aot.compile_product(target, 16, four_bits),
        tile.block_n * sparse24_packing.COLUMNS,
        32 * tile.num_warps,
        "a weight",
        5.0,
        held,
    )


def _trellis(tokens: int, held: tuple[float, float]) -> Case:
    return Case(
        f"trellis of 2 bits, up to {tokens} rows",
        lambda target: test_efficient_linear_trellis_aot.compile_product(target, tokens),
        trellis.TILES[tokens].block_n * trellis_packing.COLUMNS,
        32 * trellis.TILES[tokens].num_warps,
        "a weight",
        None,
        held,
    )


def _prefill(budget: float, held: tuple[float, float]) -> Case:
    """Instructions of a thread for 64 keys."""
    tile = config.forward_config(torch.bfloat16, 128, 999, 0, "sm_90")
    return Case(
        "prefill, heads of 128 channels",
        lambda target: test_flash_paged_aot.compile_forward(target, 128),
        tile.block_n / 64,
        1,
        "64 keys, of one thread",
        budget,
        held,
        is_masked=True,
    )


CASES = [
    _decode(None, 64, 3.2, (2.47, 2.52)),
    _decode(None, 16, 4.0, (2.59, 2.60)),
    _decode("int8", 64, 4.0, (2.80, 2.83)),
    _decode("fp8", 64, 5.0, (3.44, 3.48)),
    _decode("int4", 64, 4.0, (3.09, 3.59)),
    _decode("int2", 64, 3.5, (2.90, 3.37)),
    _weights(4, 16, 3.2, (3.2, 4.32)),
    _weights(4, 64, None, (4.5, 8.5)),  # tiles of 256 rows took 3.6, and an H200 longer
    _weights(8, 16, None, (5.4, 5.75)),
    _w8a8(16, (1.13, 1.03)),
    _sparse24(False, (2.87, 3.6)),
    _sparse24(True, (3.83, 5.2)),
    _trellis(16, (11.4, 11.5)),
    _prefill(240, (366, 545)),
]
