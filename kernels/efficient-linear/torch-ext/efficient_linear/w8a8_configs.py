"""The tile for each number of tokens in products of 8-bit weights and activations; no autotuning at run time.

The table follows from register and shared memory counts of the compiled kernels and from memory formulas. It is not
measured.
"""

from .launch_configs import Tile


# Most tokens -> tile. Up to 64 tokens one program has all of them, so weights are read once.
TILES = {
    16: Tile(64, 16, 4, 4, 4),
    32: Tile(64, 32, 4, 4, 4),
    64: Tile(64, 64, 4, 4, 3),
    128: Tile(128, 64, 8, 4, 2),
    float("inf"): Tile(128, 128, 8, 4),
}
# Kernels that need more registers: float8 codes that become float16 in them (GPUs without float8), and block scales,
# whose float32 sums are kept next to those of the matrix instructions (128x128 spills on sm_100)
TILES_OF_MANY_REGISTERS = {
    16: Tile(64, 16, 4, 4, 4),
    32: Tile(64, 32, 4, 4, 4),
    64: Tile(64, 64, 4, 3, 3),
    float("inf"): Tile(128, 64, 8, 3),
}
# For rows whose length or stride is no multiple of 16, which are read byte by byte: more would not fit the registers
UNALIGNED_TILE = Tile(64, 16, 8, 2, 4)
# Tiles that the tensor memory accelerator loads (compute capability 9 and 10), without registers to spare for block
# scales, zero points and outliers.
TMA_TILES = {"int8": Tile(128, 256, 8, 4), "fp8": Tile(128, 128, 8, 4)}
TMA_FROM = None  # the fewest tokens for which they are used; None: never, because nothing is measured
STAGES_ON_ROCM = 2  # 64 KB of shared memory

# scales -> the fewest tokens for which torch._scaled_mm computes the float8 product; None: never, because it is not
# measured where that is faster
SCALED_MM_FROM = {"tensor": None, "channel": None}


def choose_tile(tokens: int, many_registers: bool, aligned: bool) -> Tile:
    if not aligned:
        return UNALIGNED_TILE
    table = TILES_OF_MANY_REGISTERS if many_registers else TILES
    return next(tile for most, tile in table.items() if tokens <= most)
