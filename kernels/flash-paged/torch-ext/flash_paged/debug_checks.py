"""Checks of the values in integer tensors, which wait for the GPU and so fail in a CUDA graph capture.

They run only with the environment variable FLASH_PAGED_DEBUG=1, read when the package is imported.
"""

import os

import torch

from .kv_formats import QuantizedKV


DEBUG = os.environ.get("FLASH_PAGED_DEBUG") == "1"


def _fail(name: str, tensor: torch.Tensor, wrong: torch.Tensor, allowed: str) -> None:
    """Raises ValueError for the first entry of `tensor` that is `wrong`."""
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}[{', '.join(map(str, index))}] is {tensor[tuple(index)].item()}: allowed is {allowed}")


def check_numbers(name: str, tensor: torch.Tensor | None, count: int, what: str) -> None:
    """Checks numbers of blocks or slots: -1 (none) to count - 1."""
    if DEBUG and tensor is not None:
        _fail(name, tensor, (tensor < -1) | (tensor >= count), f"-1 to {count - 1}, the {what}")


def check_lengths(cache_seqlens: torch.Tensor, appended: int, capacity: int) -> None:
    """Checks that the sequences with their new tokens fit into `capacity` tokens."""
    if DEBUG:
        allowed = f"at most {capacity - appended}, {capacity} tokens in the pages less {appended} new ones"
        _fail("cache_seqlens", cache_seqlens, cache_seqlens > capacity - appended, allowed)


def check_ring(kv: QuantizedKV, cache_seqlens: torch.Tensor, appended: int, capacity: int, block_size: int) -> None:
    """Checks that whole groups are quantized and the other tokens fit into the ring, but for padding."""
    if DEBUG:
        quantized, ring, group = kv.quantized_seqlens, kv.k_tail.shape[1], block_size // kv.k_scale.shape[1]
        wrong = (quantized < 0) | (quantized > capacity) | (quantized % group != 0)
        _fail("quantized_seqlens", quantized, wrong, f"0 to {capacity}, in groups of {group} tokens")
        rest = cache_seqlens + appended - quantized
        wrong = (cache_seqlens >= 0) & ((rest < 0) | (rest > ring))
        _fail("cache_seqlens + new tokens - quantized_seqlens", rest, wrong, f"0 to {ring}, the tokens of a tail")


def check_cumulative(name: str, lengths: torch.Tensor, end: int | None = None, longest: int | None = None) -> None:
    """Checks that cumulative lengths start at 0, never decrease, end at `end` or before, in steps up to `longest`."""
    if DEBUG:
        _fail(name, lengths[:1], lengths[:1] != 0, "0, where the first sequence starts")
        steps = lengths.diff()
        _fail(f"the difference of {name}", steps, steps < 0, "0 or more: they must not decrease")
        if end is not None and lengths[-1] > end:
            raise ValueError(f"{name}[-1] is {lengths[-1].item()}: allowed is at most {end}, the number of tokens")
        if longest is not None:
            _fail(f"the difference of {name}", steps, steps > longest, f"at most {longest}")


def check_copies(mapping: torch.Tensor, num_blocks: int) -> None:
    """Checks that block pairs are in range, no block is written twice or both read and written."""
    if DEBUG:
        check_numbers("mapping", mapping, num_blocks, "blocks of the cache")
        sources, targets = mapping[(mapping >= 0).all(1)].unbind(1)
        if targets.unique().numel() != targets.numel() or torch.isin(targets, sources).any():
            raise ValueError("mapping writes a block twice, or reads one that it writes: the copies run side by side")
