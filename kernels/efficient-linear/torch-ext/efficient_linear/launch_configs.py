"""The kernel and tile for each number of tokens: a table, no autotuning at run time.

The tables follow from instruction counts and memory formulas. Those of 16-bit inputs for 1, 16, 64 and 256 tokens are
the fastest of what an H200 measured in November 2026 (triton 3.6), where one tile serves several shapes and formats;
`benchmarks/linear.py` measures them again.
"""

from dataclasses import dataclass, replace

import triton


@dataclass(frozen=True)
class Tile:
    """One program: BLOCK_N rows of the weight (16 a warp: every warp then holds its own matrix-instruction operands)
    times BLOCK_M tokens. `programs_per_processor`: how many programs a multiprocessor should get, by splitting K; 0 =
    K not split."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    programs_per_processor: int = 0


# Most tokens -> tile. Up to 64 tokens one program has all of them, so weights are read once.
SIXTEEN_BIT_INPUT = {
    16: Tile(64, 16, 4, 4, 4),
    32: Tile(64, 32, 4, 4, 4),
    64: Tile(64, 64, 4, 3, 3),
    256: Tile(128, 64, 8, 3),
}
# 8-bit weights and up to MOST_SMALL tokens, where matrix instructions then take both operands from registers
# (weight_only._has_small_tiles): they wait for no other warp, with fewer registers and half the shared memory. Weights
# of fewer bits are slower so.
SMALL, MOST_SMALL = Tile(64, 8, 4, 4, 4), 8


@dataclass(frozen=True)
class RegisterTile(Tile):
    """Of `register_products`: its warps share the chunks of K. exchange: how they load x (see `load_x`)."""

    exchange: bool = False


CHUNK = 256  # columns of K that one warp takes at a time
# Most tokens -> tile. On an H200 (28672 x 4096, groups of 64 with zero points; 1 and 8 tokens) 27 and 28 us with 4
# bits, where the tiles above take 38; 16 tokens took 40 and 37. Without zero points those take 32, these 24 and 38.
IN_REGISTERS = {2: RegisterTile(16, 8, 4, 1, 4), 8: RegisterTile(32, 8, 4, 1, 4, exchange=True)}
MOST_WITHOUT_ZERO_POINTS = 2
# float32 has no exact matrix instruction: plain multiply-adds, small tiles, for comparison rather than for speed
FLOAT32_INPUT = {64: Tile(32, 16, 4, 2, 4), 256: Tile(32, 32, 4, 2)}


@dataclass(frozen=True)
class DenseTile(Tile):
    """Of a dense weight [N, K]: `block_k` columns a step."""

    block_k: int = 64


# Most tokens -> tile. Stages of all programs of a multiprocessor hold 100 to 160 KB, what memory delivers in a latency.
DENSE_SIXTEEN_BIT = {16: DenseTile(64, 16, 4, 4, 4), 32: DenseTile(64, 32, 4, 4, 4), 64: DenseTile(64, 64, 4, 3, 3)}
DENSE_ON_HOPPER = DenseTile(64, 16, 4, 4, 2, 128)  # up to 16 tokens: an H200 was 8 percent faster; others have no room
DENSE_FLOAT32 = {64: DenseTile(32, 16, 4, 2, 4, 32)}
GATE_UP_64 = DenseTile(64, 64, 8, 4, 1)  # two sums of 64 x 64 take more registers than four warps have

# With more tokens than this the weight is dequantized once and multiplied by torch. On an H200 (28672 x 4096, int4)
# that takes 145 us for 128 tokens and 166 us for 256, and the kernels here 97 and 178 us.
DEQUANTIZE_ABOVE = 192

# Of 128 columns, of 256 with 3 bits, of 64 in dense products: shorter splits spend their time filling the pipeline and
# adding up (4096 x 4096 on an H200: 9.1 us in four splits, 10.2 in eight). Half as many where multiprocessors would
# have nothing to do.
FEWEST_STEPS_PER_SPLIT = 8


def choose_tile(tokens: int, float32: bool, bits: int = 4, small: bool = False) -> Tile:
    """The tile for 1 .. DEQUANTIZE_ABOVE tokens; more take that of as many. small: whether it may be `SMALL`."""
    if small and bits == 8 and tokens <= MOST_SMALL and not float32:
        return SMALL
    table = FLOAT32_INPUT if float32 else SIXTEEN_BIT_INPUT
    tile = next(tile for most, tile in table.items() if min(tokens, DEQUANTIZE_ABOVE) <= most)
    # a step of 3-bit weights is twice as long: with 64 tokens it takes more registers (sm_80) and tensor memory
    # (sm_100) than there are
    return replace(tile, block_m=min(tile.block_m, 32)) if bits == 3 else tile


def choose_dense_tile(tokens: int, float32: bool, is_gate_up: bool = False, on_hopper: bool = False) -> DenseTile:
    """The tile of products of 1 to 64 tokens with dense weights. on_hopper: for compute capability 9."""
    if on_hopper and tokens <= 16 and not float32:
        return DENSE_ON_HOPPER
    if is_gate_up and tokens > 32 and not float32:
        return GATE_UP_64
    return next(tile for most, tile in (DENSE_FLOAT32 if float32 else DENSE_SIXTEEN_BIT).items() if tokens <= most)


@triton.constexpr_function
def steps_a_round(block_m, bits):
    """Steps of K in one round of the loop: few tokens leave registers for two, which share what surrounds them. A step
    of 3-bit weights is twice as long as the others."""
    return 2 if bits != 3 and block_m <= 16 else 1


def stages(tile: Tile, bits: int) -> int:
    """num_stages of the loop over K, whose rounds have 128 or 256 columns."""
    if bits == 3:
        return (tile.num_stages + 1) // 2
    return tile.num_stages // 2 + 1 if steps_a_round(tile.block_m, bits) == 2 else tile.num_stages


def choose_steps_per_split(tile: Tile, programs: int, steps: int, processors: int) -> int:
    """How many of the `steps` of K one program takes, for `programs` tiles on `processors` multiprocessors: an even
    number, for rounds of two."""
    if isinstance(tile, RegisterTile):
        round_ = CHUNK // 128 * tile.num_warps  # the warps of a program take a chunk each
        splits = max(1, min(tile.programs_per_processor * processors // programs, steps // round_))
        return min(steps, triton.cdiv(steps, splits * round_) * round_)
    fewest = FEWEST_STEPS_PER_SPLIT
    if programs * (steps // fewest) < processors:
        fewest //= 2
    splits = max(1, min(tile.programs_per_processor * processors // programs, steps // fewest))
    return min(steps, -(-steps // (2 * splits)) * 2)
