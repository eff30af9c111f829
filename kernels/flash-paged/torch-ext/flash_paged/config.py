"""Tile sizes by head dim, dtype and maker of the GPU: one table, no autotuning. Also what the launchers ask about the
device."""

import contextlib
import functools
import math
from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled for one kind of GPU, head dim and dtype."""

    block_m: int  # rows of the tile: queries, or queries times grouped heads when decoding
    block_n: int  # keys a step
    num_warps: int
    num_stages: int
    registers: int | None = None  # the most that a thread may have, on NVIDIA's GPUs

    @property
    def programs_per_processor(self) -> int:
        """Of decoding: as many as the registers allow, else two."""
        return 2 if self.registers is None else 65536 // (32 * self.num_warps * self.registers)


# kind of GPU -> (largest head dim, bytes an element) -> configuration for `forward_kernel`. As large as fits the
# registers without spills in causal attention (triton 3.7.1). "sm_80": also sm_86, sm_89 and sm_120, so that 99 KiB of
# shared memory must do; sm_90 and sm_100 have 227; "amd" (gfx942): 64 KiB and wavefronts of 64 threads, and what it
# spills are scalars that go to vector registers.
_FORWARD_FLOAT32 = {
    (64, 4): Config(32, 16, 4, 2),
    (128, 4): Config(32, 16, 8, 2),
    (192, 4): Config(16, 16, 8, 2),
    (256, 4): Config(16, 16, 8, 2),
}
_FORWARD = {
    "sm_80": {
        (64, 2): Config(128, 64, 8, 3),
        (128, 2): Config(128, 64, 8, 3),
        (192, 2): Config(128, 32, 8, 2),
        (256, 2): Config(64, 32, 8, 2),
        **_FORWARD_FLOAT32,
    },
    "sm_90": {
        (64, 2): Config(128, 64, 8, 3),
        (128, 2): Config(128, 64, 8, 3),
        (192, 2): Config(128, 64, 8, 2),
        (256, 2): Config(128, 32, 8, 2),
        **_FORWARD_FLOAT32,
    },
    "sm_100": {
        (64, 2): Config(128, 64, 8, 2),
        (128, 2): Config(128, 64, 8, 3),
        (192, 2): Config(128, 64, 8, 2),
        (256, 2): Config(128, 32, 8, 2),
        **_FORWARD_FLOAT32,
    },
    "amd": {
        (64, 2): Config(128, 32, 4, 2),
        (128, 2): Config(128, 32, 4, 2),
        (192, 2): Config(128, 32, 4, 1),
        (256, 2): Config(64, 32, 4, 1),
        (64, 4): Config(32, 32, 4, 2),
        (128, 4): Config(32, 32, 4, 2),
        (192, 4): Config(16, 16, 4, 2),
        (256, 4): Config(16, 16, 4, 2),
    },
}
# backend -> (largest head dim, bits of a number) -> configurations, by rows of the tile. Small enough for the 99 KiB of
# sm_86 and sm_89. Two warps of 255 registers, and four programs a multiprocessor: nothing spills in the loop, and fewer
# warps repeat what surrounds it. Addresses for the end of a lane spill.
_DECODE = {
    "nvidia": {
        (64, 16): (Config(16, 64, 4, 3), Config(64, 64, 4, 3)),
        (128, 16): (Config(16, 64, 2, 2, 255), Config(64, 64, 8, 3)),
        (192, 16): (Config(16, 64, 4, 2), Config(32, 32, 8, 2)),
        (256, 16): (Config(16, 32, 4, 2), Config(32, 32, 8, 2)),
        (64, 32): (Config(16, 32, 4, 2), Config(32, 32, 4, 2)),
        (256, 32): (Config(16, 16, 4, 2),),
    },
    "amd": {
        (128, 16): (Config(16, 32, 4, 2), Config(64, 32, 4, 2)),
        (256, 16): (Config(16, 32, 4, 2), Config(32, 32, 4, 2)),
        (64, 32): (Config(16, 32, 4, 2), Config(32, 32, 4, 2)),
        (256, 32): (Config(16, 16, 4, 2),),
    },
}


# backend -> (largest head dim, bytes an element) -> configurations of the backward kernels: of the one that keeps
# block_m queries and walks over keys, and of the one that keeps block_n keys and walks over queries. As large as fits
# the registers without spills, causal and with every option.
_BACKWARD = {
    "nvidia": {
        (64, 2): (Config(64, 64, 4, 2), Config(64, 64, 8, 2)),
        (128, 2): (Config(64, 64, 8, 2), Config(32, 64, 8, 2)),
        (256, 2): (Config(32, 32, 8, 2), Config(32, 32, 8, 2)),
        (64, 4): (Config(32, 16, 4, 1), Config(16, 16, 4, 1)),
        (256, 4): (Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    },
    "amd": {
        (64, 2): (Config(32, 16, 4, 1), Config(32, 32, 4, 1)),
        (128, 2): (Config(64, 32, 4, 1), Config(32, 32, 4, 1)),
        (256, 2): (Config(32, 16, 4, 1), Config(16, 16, 4, 1)),
        (256, 4): (Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
    },
}


@functools.lru_cache
def gpu_kind(device: torch.device) -> str:
    """The row of the forward tables for `device` (the interpreter's CPU: "sm_80")."""
    if torch.version.hip:
        return "amd"
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def forward_config(dtype: torch.dtype, head_dim: int, queries: int, page_size: int, kind: str) -> Config:
    """The tiles of `forward_kernel`. head_dim: the larger of key and value head dim. queries: of the longest sequence.
    page_size: 0 for no pages."""
    limit = next(limit for limit in (64, 128, 192, 256) if head_dim <= limit)
    config = _FORWARD[kind][limit, dtype.itemsize]
    block_m = max(16, triton.next_power_of_2(queries))
    if block_m < config.block_m:
        num_warps = 8 if head_dim > 128 and kind != "amd" else 4
        config = replace(config, block_m=block_m, block_n=min(config.block_n, 32), num_warps=num_warps)
    if kind == "sm_90" and page_size % config.block_n:  # Triton gives half of the stages to loading page numbers
        config = replace(config, num_stages=2 * config.num_stages - 1)
    return config


def backward_config(dtype: torch.dtype, head_dim: int, kind: str) -> tuple[Config, Config]:
    """The tiles of `backward.queries_kernel` and `backward.keys_kernel`. head_dim: the larger of key and value head
    dim."""
    table = _BACKWARD["amd" if kind == "amd" else "nvidia"]
    return table[min(key for key in table if key[1] == dtype.itemsize and head_dim <= key[0])]


# Of key tiles a multiprocessor: more have not been measured. With four warps instead of two of 255 registers an H200
# took 10.8 us instead of 12.9 for one sequence of 200 tokens (heads of 128 channels), 19.6 instead of 26.7 for 32 of
# 300, 51.8 instead of 52.9 for 8 of 4,000; for one of 4,000, 25.5 instead of 22.6.
FEW_KEYS = 32


def decode_config(
    dtype: torch.dtype, head_dim: int, rows: int, backend: str | None = None, tiles: float = math.inf
) -> Config:
    """The tiles of `decode_kernel`. rows: queries times query heads per key head. tiles: of 64 keys, of all sequences
    and key heads, for each multiprocessor."""
    table = _DECODE[backend or ("amd" if torch.version.hip else "nvidia")]
    bits = 8 * dtype.itemsize
    configs = table[min(key for key in table if key[1] == bits and head_dim <= key[0])]
    config = next((config for config in configs if rows <= config.block_m), configs[-1])
    if config.registers is not None and tiles <= FEW_KEYS:
        config = replace(config, num_warps=4, registers=None)
    return config


@dataclass(frozen=True)
class CodesConfig:
    """Of `decode_codes_kernel`: rows of the tile; warps, and keys of each; registers a thread, on NVIDIA's GPUs.

    values_ahead: values and scales of key channels are loaded into registers a tile before their use. Keys and numbers
    of tokens always are, and page numbers a tile before them; minimums of key channels never. move (NVIDIA): weights
    change lanes without shared memory, so that no barrier stands in the loop."""

    block_m: int
    warps: int = 4
    keys: int = 16
    registers: int = 255
    values_ahead: bool = False
    move: bool = False

    @property
    def programs_per_processor(self) -> int:
        return 65536 // (32 * self.warps * self.registers)


def codes_config(head_dim: int, rows: int, bits: int, tokens: int, backend: str | None = None) -> CodesConfig:
    """Arguments as of `decode_config`. tokens: of a group that shares a key scale, or with 8 bits of a page.

    Measured on an H200 with Triton 3.6.0, 16 sequences of 32,768 tokens, 4 query heads a key head of 128 channels,
    pages and groups of 64: programs of one warp with 32 keys were the fastest of 12 or 13 configurations of each
    format, 1.77 times as fast as bfloat16 with int4, 1.57 with int2, 1.56 with int8 and 1.49 with fp8. So they were
    although int4 and int2 spill a few registers in the loop. With 8 bits, one warp with 16 keys was 4 to 5 percent
    slower. Pages that are no multiple of 32 have it: each warp then reads one page, if 16 divides them.

    Not measured: the rest. The sums of a warp take its registers, so heads of more than 128 channels get 8 rows; AMD's
    matrix instructions have 16."""
    if (backend or ("amd" if torch.version.hip else "nvidia")) == "amd":
        return CodesConfig(16)
    if head_dim > 128:
        return CodesConfig(8)
    if rows > 8:
        return CodesConfig(16)
    if tokens % 32 == 0:
        return CodesConfig(8, 1, 32, values_ahead=bits == 2, move=True)
    return CodesConfig(8, 1, 16, 168, move=True) if bits == 8 else CodesConfig(8, 2, 16, 200)


def processors(device: torch.device) -> int:
    """Programs that run side by side; 8 in the interpreter, so that keys are split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def launch_device(tensor: torch.Tensor):
    """Context in which a kernel on `tensor` must be launched: Triton uses the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
