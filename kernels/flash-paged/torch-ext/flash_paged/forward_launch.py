"""What the launchers of the forward kernels share: strides by token, and the order in which programs start."""

import torch
import triton


_L2_BYTES = 32 * 2**20  # keys and values that programs running side by side should share, as in FlashAttention-3


# How many times the tiles that there can be a batch padded to its longest sequence has. From here on each program
# searches its tile, which takes some loads, where most programs would have nothing to do.
MANY_EMPTY = 2


def packed_tiles(tokens: int, batch: int, block_m: int) -> int:
    """The tiles of block_m queries that `batch` sequences of `tokens` tokens together can have: each may end in a part
    of one."""
    return tokens // block_m + min(tokens, batch)


def most_are_empty(tokens: int, batch: int, tiles: int, block_m: int) -> bool:
    """Whether packed sequences of at most `tiles` tiles leave so many programs without one."""
    return batch * tiles >= MANY_EMPTY * packed_tiles(tokens, batch, block_m)


def token_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(sequence, token, head) of x [B, S, H, D], or of x [T, H, D], whose sequences lie one after the other."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def lse_strides(lse: torch.Tensor | None) -> tuple[int, int]:
    """(sequence, head) of softmax_lse [B, H, S] or [H, T]."""
    if lse is None:
        return 0, 0
    return (0, lse.stride(0)) if lse.dim() == 2 else lse.stride()[:2]


def pairs_a_section(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, keys: int) -> int:
    """How many (sequence, head) pairs to work on at a time (see tiles.program_tile), so that the keys and values they
    read fit into the L2 cache. keys: of a sequence, or of all together where k is [T, H, D].
    """
    if k.dim() == 3:
        keys = triton.cdiv(keys, batch)
    bytes_a_head = max(1, keys * (k.shape[-1] + v.shape[-1]) * k.element_size())
    heads = q.shape[-2]
    return min(max(1, _L2_BYTES // bytes_a_head) * (heads // k.shape[-2]), batch * heads)
