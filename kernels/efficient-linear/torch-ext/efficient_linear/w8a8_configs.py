"""The tile for each number of tokens in products of 8-bit weights and activations; no autotuning at run time.

The tables follow from register and shared memory counts of the compiled kernels and from memory formulas. An H200
measured int8 with 1, 16, 64, 256 and 8192 tokens, and fp8 with 8192 (November 2026, triton 3.6). The rest is not
measured.
"""

from .launch_configs import Tile


# Most tokens -> tile. Up to 64 tokens one program has all of them, so weights are read once.
TILES = {
    16: Tile(64, 16, 4, 4, 4),
    32: Tile(64, 32, 4, 4, 4),
    64: Tile(64, 64, 4, 3, 4),
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
FEW_ROWS_TILE = Tile(64, 64, 4, 4)  # where tiles of many tokens are fewer than multiprocessors
# Tiles that the tensor memory accelerator loads (compute capability 9 and 10), without registers to spare for block
# scales, zero points and outliers; used where they are as many as multiprocessors
TMA_TILES = {"int8": Tile(128, 256, 8, 4), "fp8": Tile(256, 128, 8, 4)}
TMA_FROM = {"int8": 256, "fp8": 1024}  # the fewest tokens for which they are used
TMA_ON = {"int8": (9, 10), "fp8": (9,)}  # compute capabilities: 12 has 99 KB for the tiles, fp8 spills on 10
STAGES_ON_ROCM = 2  # 64 KB of shared memory

# scales -> the fewest tokens for which torch._scaled_mm computes the float8 product; None: never, because it is not
# measured where that is faster
SCALED_MM_FROM = {"tensor": None, "channel": None}


def choose_tile(tokens: int, many_registers: bool, aligned: bool, rows: int = 1 << 30, processors: int = 1) -> Tile:
    """rows: of the weight."""
    if not aligned:
        return UNALIGNED_TILE
    table = TILES_OF_MANY_REGISTERS if many_registers else TILES
    tile = next(tile for most, tile in table.items() if tokens <= most)
    if tile is TILES[float("inf")] and programs(tile, tokens, rows) < processors:
        return FEW_ROWS_TILE
    return tile


def programs(tile: Tile, tokens: int, rows: int) -> int:
    """The tiles of an output [tokens, rows]."""
    return -(-rows // tile.block_n) * -(-tokens // tile.block_m)
