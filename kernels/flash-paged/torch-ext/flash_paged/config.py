"""Tile sizes by head dim, dtype and GPU: one table, no autotuning. Also what the launchers ask about the device."""

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


# (largest head dim, bytes an element) -> configuration, for GPUs with much shared memory (A100, H100, B200) ...
_FORWARD = {
    (64, 2): Config(128, 64, 4, 3),
    (128, 2): Config(128, 64, 8, 3),
    (256, 2): Config(64, 32, 4, 2),
    (64, 4): Config(32, 32, 4, 2),
    (128, 4): Config(32, 32, 4, 2),
    (256, 4): Config(16, 16, 4, 2),
}
_DECODE = {
    (64, 2): Config(64, 64, 4, 3),
    (128, 2): Config(64, 64, 4, 3),
    (256, 2): Config(32, 32, 4, 2),
    (64, 4): Config(32, 32, 4, 2),
    (128, 4): Config(32, 32, 4, 2),
    (256, 4): Config(16, 16, 4, 2),
}
# ... and what shrinks on the others (gfx942 has 64 KiB a block, consumer GPUs 99 KiB).
_SMALL_SHARED_MEMORY = {(128, 2): {"num_stages": 1}}


def _lookup(table: dict, device: torch.device, dtype: torch.dtype, head_dim: int, rows: int) -> Config:
    bucket = next(limit for limit in (64, 128, 256) if head_dim <= limit), dtype.itemsize
    config = table[bucket]
    if shared_memory(device) < 128 * 1024:
        config = replace(config, num_stages=min(2, config.num_stages))
    block_m = min(config.block_m, max(16, triton.next_power_of_2(rows)))
    return replace(config, block_m=block_m, num_warps=4 if block_m <= 64 else config.num_warps)


def forward_config(device: torch.device, dtype: torch.dtype, head_dim: int, queries: int) -> Config:
    """For `forward_kernel`; head_dim is the larger of key and value head dim, queries the longest row."""
    return _lookup(_FORWARD, device, dtype, head_dim, queries)


def decode_config(device: torch.device, dtype: torch.dtype, head_dim: int, rows: int) -> Config:
    """For `decode_kernel`; rows is queries times query heads per key head."""
    return _lookup(_DECODE, device, dtype, head_dim, rows)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one block can have (the interpreter: as an H100)."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


def processors(device: torch.device) -> int:
    """How many programs run side by side (the interpreter: 8, so that keys are split there too)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def launch_device(tensor: torch.Tensor):
    """Context in which a kernel on `tensor` must be launched: Triton uses the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
