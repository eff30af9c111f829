"""Tile sizes by head dim, dtype and maker of the GPU: one table, no autotuning. Also what the launchers ask about the device."""

import contextlib
from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Config:
    block_m: int  # rows of the tile: queries, or queries times grouped heads when decoding
    block_n: int  # keys a step
    num_warps: int
    num_stages: int


# backend -> (largest head dim, bytes an element) -> configuration. NVIDIA: as large as fits the registers of sm_80 and sm_90
# without spills. AMD (gfx942): 64 KiB of shared memory a block and wavefronts of 64 threads.
_FORWARD = {
    "nvidia": {
        (64, 2): Config(128, 64, 8, 3),
        (128, 2): Config(128, 64, 8, 3),
        (256, 2): Config(64, 32, 8, 2),
        (64, 4): Config(32, 32, 4, 2),
        (128, 4): Config(32, 16, 4, 2),
        (256, 4): Config(16, 16, 4, 2),
    },
    "amd": {
        (64, 2): Config(128, 32, 4, 2),
        (128, 2): Config(128, 32, 4, 2),
        (256, 2): Config(64, 32, 4, 1),
        (64, 4): Config(32, 32, 4, 2),
        (128, 4): Config(32, 32, 4, 2),
        (256, 4): Config(16, 16, 4, 2),
    },
}
_DECODE = {
    "nvidia": {
        (64, 2): Config(64, 64, 4, 3),
        (128, 2): Config(64, 64, 4, 3),
        (256, 2): Config(32, 32, 4, 2),
        (64, 4): Config(32, 32, 4, 2),
        (128, 4): Config(16, 16, 4, 2),
        (256, 4): Config(16, 16, 4, 2),
    },
    "amd": {
        (64, 2): Config(64, 32, 4, 2),
        (128, 2): Config(64, 32, 4, 2),
        (256, 2): Config(32, 32, 4, 2),
        (64, 4): Config(32, 32, 4, 2),
        (128, 4): Config(32, 16, 4, 2),
        (256, 4): Config(16, 16, 4, 2),
    },
}


def _lookup(table: dict, dtype: torch.dtype, head_dim: int, rows: int, backend: str | None) -> Config:
    bucket = next(limit for limit in (64, 128, 256) if head_dim <= limit), dtype.itemsize
    config = table[backend or ("amd" if torch.version.hip else "nvidia")][bucket]
    block_m = max(16, triton.next_power_of_2(rows))
    return config if block_m >= config.block_m else replace(config, block_m=block_m, num_warps=4)


def forward_config(dtype: torch.dtype, head_dim: int, queries: int, backend: str | None = None) -> Config:
    """For `forward_kernel`; head_dim is the larger of key and value head dim, queries the longest row."""
    return _lookup(_FORWARD, dtype, head_dim, queries, backend)


def decode_config(dtype: torch.dtype, head_dim: int, rows: int, backend: str | None = None) -> Config:
    """For `decode_kernel`; rows is queries times query heads per key head."""
    return _lookup(_DECODE, dtype, head_dim, rows, backend)


def processors(device: torch.device) -> int:
    """How many programs run side by side (the interpreter: 8, so that keys are split there too)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def launch_device(tensor: torch.Tensor):
    """Context in which a kernel on `tensor` must be launched: Triton uses the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
