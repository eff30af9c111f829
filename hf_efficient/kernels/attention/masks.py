"""Which keys a query sees, and how far away they are."""

from typing import NamedTuple

import torch


class QueryBatch(NamedTuple):
    """The queries of each sequence of a batch, and which keys they see.

    positions: int64 [B, S], of the queries.
    lengths: int64 [B], keys of each sequence.
    left, right: keys seen before and after the query's position, -1 for no limit (causal attention is right 0).
    ancestors: bool [B, S, S] or None. With it the last S keys are the nodes of a token tree, and query i sees node j
        where ancestors[b, i, j].
    slopes: float32 [B, Hq] or None, of ALiBi (https://arxiv.org/abs/2108.12409). Or [B, Hq, n]: what distances from 0
        to n - 1, and all beyond, add to the scores, as in T5 (https://arxiv.org/abs/1910.10683).
    """

    positions: torch.Tensor
    lengths: torch.Tensor
    left: int
    right: int
    ancestors: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    @classmethod
    def aligned(cls, lengths, width: int, causal: bool, left: int, right: int, tree_mask=None, slopes=None):
        """`width` queries at the end of each sequence; the nodes of a tree stand right behind their ancestors."""
        first = (lengths - width)[:, None]
        if slopes is not None:
            slopes = slopes.expand(lengths.shape[0], *(-1,) * max(1, slopes.dim() - 1))
        if tree_mask is None:
            positions = first + torch.arange(width, device=lengths.device)
            return cls(positions, lengths, left, 0 if causal else right, None, slopes)
        ancestors = (tree_mask[..., None] >> torch.arange(width)) & 1
        return cls(first + ancestors.sum(-1) - 1, lengths, left, -1, ancestors.bool(), slopes)

    def select(self, sequences: torch.Tensor) -> "QueryBatch":
        """The queries of these sequences (int64 [n])."""
        return QueryBatch(*(x[sequences] if isinstance(x, torch.Tensor) else x for x in self))

    @property
    def first_seen(self) -> torch.Tensor:
        """int64 [B]: no query of the sequence sees a key before this one."""
        if self.left < 0:
            return torch.zeros_like(self.lengths)
        return (self.lengths - self.positions.shape[1] - self.left).clamp_min(0)

    def _nodes(self, keys):
        """The tree node of each key [B, n], negative for keys before the tree, and the same clamped to the tree."""
        node = keys - (self.lengths - self.positions.shape[1])[:, None]
        return node, node.clamp(0, self.positions.shape[1] - 1)

    def key_positions(self, keys: torch.Tensor) -> torch.Tensor:
        """int64 [B, n]: the positions of keys, which are given by their index in the sequence."""
        if self.ancestors is None:
            return keys
        node, inside = self._nodes(keys)
        return torch.where(node < 0, keys, self.positions.gather(1, inside))

    def sees(self, keys: torch.Tensor) -> torch.Tensor:
        """bool [B, S, n]: which of the keys [B, n] (indices in the sequence) each query sees."""
        seen = (keys < self.lengths[:, None])[:, None].expand(*self.positions.shape, keys.shape[-1])
        if self.ancestors is not None:
            node, inside = self._nodes(keys)
            listed = self.ancestors.gather(2, inside[:, None].expand(*self.positions.shape, -1))
            seen = seen & (listed | (node < 0)[:, None])
        at, keys = self.positions[..., None], self.key_positions(keys)[:, None]
        if self.left >= 0:
            seen = seen & (keys >= at - self.left)
        if self.right >= 0:
            seen = seen & (keys <= at + self.right)
        return seen

    def bias(self, keys: torch.Tensor) -> torch.Tensor:
        """float32 [B, Hq, S, n]: what ALiBi, or a table of distances, adds to the scores."""
        distance = (self.positions[..., None] - self.key_positions(keys)[:, None]).abs()
        if self.slopes.dim() == 3:
            at = distance.clamp(max=self.slopes.shape[-1] - 1).flatten(1)[:, None].expand(-1, self.slopes.shape[1], -1)
            return self.slopes.gather(2, at).unflatten(2, distance.shape[1:])
        return distance[:, None] * -self.slopes[..., None, None]


def visibility(positions, lengths, width: int, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """bool [B, S, width]: whether the query at `positions` [B, S] sees key j of its sequence.

    No query sees keys at or beyond `lengths` [B]. window_size: keys seen to the left and right, -1 for no limit.
    """
    left, right = window_size
    queries = QueryBatch(positions, lengths, left, 0 if causal else right)
    return queries.sees(torch.arange(width, device=positions.device).expand(len(lengths), width))


def additive(seen: torch.Tensor) -> torch.Tensor:
    """Mask [B, 1, S, n] of zeros and -inf from bool [B, S, n]; float32, the only dtype that SDPA need not convert."""
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))[:, None]
