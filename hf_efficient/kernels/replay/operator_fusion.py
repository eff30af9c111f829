"""Captures with fewer kernels: patterns of operators of a forward, each put into one operator of ours.

A kernel family registers its patterns (`fuses`), this file knows none. What the patterns make of a forward is run once
and compared with the forward itself: it is captured only where both agree up to rounding.
"""

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from hf_efficient.kernels.replay.host_reads import NotReplayable
from hf_efficient.kernels.replay.operators import Operators


logger = logging.get_logger(__name__)

MOST_TOKENS = 64  # of a forward: the kernels of several operators serve few tokens
_PATTERNS: list[tuple[int, Callable[[Operators], None]]] = []


def fuses(rank: int) -> Callable:
    """Decorates a pattern, a function that changes an `Operators`. Patterns run from the lowest rank to the highest."""

    def register(pattern: Callable[[Operators], None]) -> Callable:
        _PATTERNS.append((rank, pattern))
        return pattern

    return register


def fused(forward: Callable) -> Callable:
    """`forward` in fewer operators, or `forward` itself where that is not possible.

    forward: without arguments; it writes the same each time, as appending to a cache at given lengths does.
    """
    try:
        operators = Operators(forward)
    except NotReplayable:  # the capture says why
        return forward
    expected = [x.clone() for x in tree_leaves(operators.output) if isinstance(x, torch.Tensor)]
    count = len(operators.list)
    for _, pattern in sorted(_PATTERNS, key=lambda entry: entry[0]):
        pattern(operators)
    if len(operators.list) == count:
        return forward
    found = [x for x in tree_leaves(operators()) if isinstance(x, torch.Tensor)]
    if not all(map(_agree, expected, found)):
        logger.warning_once("captured forwards keep one kernel for each operator: in fewer kernels they differ")
        return forward
    return operators


def _agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Up to the rounding of some layers: 16 units (in float32 1e-3) of the size of a row, in 19 of 20 rows. Integers
    follow from other results and are not compared."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not expected.is_floating_point():
        return True
    old, new = (x.float().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (expected, found))
    counts = old.isfinite().all(-1)
    difference, size = (new - old).norm(dim=-1)[counts], old.norm(dim=-1)[counts]
    small = difference <= max(1e-3, 16 * torch.finfo(expected.dtype).eps) * size
    return bool(small.float().mean() >= 0.95) if len(small) else True
