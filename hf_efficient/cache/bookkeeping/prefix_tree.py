"""Which blocks of a prefix cache hold which beginnings of token sequences: pure Python, no tensors.

Papers: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs
(https://arxiv.org/abs/2312.07104), RadixAttention; Yu et al., Stateful Large Language Model Serving with Pensieve
(https://arxiv.org/abs/2312.05516), for the tiers.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


UNKNOWN = -1  # in place of a token id: the tree neither stores nor finds it, nor what follows it


class Node:
    """A stored block. edge: its tokens; the path from the root holds those of the blocks before it. tier, block: where
    it is stored. beginning: data of the owner that belongs to the block."""

    __slots__ = ("beginning", "block", "children", "edge", "parent", "tier")

    def __init__(self, parent: "Node | None", edge: Hashable):
        self.parent, self.edge = parent, edge
        self.tier = self.block = -1  # nowhere
        self.beginning = None
        self.children: dict[Hashable, Node] = {}


class Move(NamedTuple):
    """Contents that go from a block of one tier to a block of a lower one."""

    node: Node
    from_tier: int
    from_block: int


class _Tier:
    """Blocks 0 … size - 1. order: the nodes from the least to the most recently used. A use marks a sequence's last
    block first, so that a block stands behind all that continue it."""

    def __init__(self, size: int):
        self.order: OrderedDict[Node, None] = OrderedDict()
        self.free = list(range(size - 1, -1, -1))


class PrefixTree:
    """A radix tree whose edges are whole blocks of tokens, so that sequences share the blocks of their common
    beginning.

    Sequences under different keys share nothing. When no block is free, the least recently used one that no other
    continues makes room: it moves to the next tier, and from the last one it is forgotten. A block never lies in a
    higher tier than one that it continues.

    sizes: blocks of each tier; the first one is the pool.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.sizes, self.block_size = [num_blocks], block_size
        self.num_evicted = 0  # from the pool
        self.clear()

    def clear(self) -> None:
        """Forgets all sequences."""
        self._root = Node(None, None)
        self._tiers = [_Tier(size) for size in self.sizes]
        self._origins: dict[Node, tuple[int, int]] = {}

    @property
    def num_blocks(self) -> int:
        return self.sizes[0]

    @property
    def num_used(self) -> int:
        return self.used(0)

    def used(self, tier: int) -> int:
        """Blocks in use in a tier."""
        return len(self._tiers[tier].order)

    def nodes(self) -> Iterator[Node]:
        """All that is stored."""
        return (node for tier in self._tiers for node in tier.order)

    def match(self, key: Hashable, tokens: Sequence[int]) -> list[Node]:
        """The longest stored beginning of `tokens`, in order; marks its blocks as used."""
        return self._walk(self._edges(key, tokens))

    def insert(self, key: Hashable, tokens: Sequence[int]) -> list[tuple[int, Node]]:
        """Stores the whole blocks of `tokens`: as many as it has in the pool, those behind them in the next tiers.

        Returns (number in the sequence, node) of those that were not there, or not in the pool, which the caller has to
        fill after doing what `moves` says. Where its own blocks take all of the tiers that its end may lie in, no more
        is stored.
        """
        edges = list(self._edges(key, tokens))
        path = self._walk(edges)
        lower = [node for node in path[: self.num_blocks] if node.tier > 0]
        for node in lower:  # all before the first takes a block, so that none of them makes room for another
            self._leave(node)
        for node in lower:
            self._settle(node, 0)
        path = [node for node in path if node.tier >= 0]  # some of its end may have made room
        new = []
        for edge in edges[len(path) :]:
            parent = path[-1] if path else self._root
            self._mark_used(path[self.num_blocks :])  # what made room since stands behind them
            tier = self._tier_for(parent, path)
            if tier is None:
                break
            child = parent.children[edge] = Node(parent, edge)
            self._settle(child, tier)
            path.append(child)
            new.append(child)
        self._mark_used(path)
        filled = {*lower, *new}
        for node in filled:
            self._origins.pop(node, None)
        return [(number, node) for number, node in enumerate(path) if node in filled]

    def _tier_for(self, parent: Node, path: list[Node]) -> int | None:
        """The highest tier that has a block for what continues `path`, whose end is `parent`; None for none."""
        if len(path) < self.num_blocks:
            return 0
        own = set(path)
        for tier in range(max(parent.tier, 1), len(self._tiers)):
            place = self._tiers[tier]
            if place.free or next(iter(place.order)) not in own:
                return tier
        return None

    def moves(self) -> list[Move]:
        """What changed its tier since the last call and has to be copied: all is read before anything is written."""
        moved = [Move(node, *origin) for node, origin in self._origins.items() if node.tier >= 0]
        self._origins = {}
        return moved

    def _edges(self, key: Hashable, tokens: Sequence[int]) -> Iterator[Hashable]:
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            edge = tuple(tokens[start : start + self.block_size])
            if UNKNOWN in edge:
                return
            yield edge if start else (key, edge)

    def _walk(self, edges) -> list[Node]:
        node, path = self._root, []
        for edge in edges:
            node = node.children.get(edge)
            if node is None:
                break
            path.append(node)
        self._mark_used(path)
        return path

    def _mark_used(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._tiers[node.tier].order.move_to_end(node)

    def _settle(self, node: Node, tier: int) -> None:
        """Gives `node` a block of `tier`; what lies there longest unused makes room."""
        place = self._tiers[tier]
        if not place.free:
            oldest = next(iter(place.order))
            self._leave(oldest)
            self.num_evicted += tier == 0
            if tier + 1 < len(self._tiers):
                self._settle(oldest, tier + 1)
            else:
                del oldest.parent.children[oldest.edge]
        node.tier, node.block = tier, place.free.pop()
        place.order[node] = None

    def _leave(self, node: Node) -> None:
        place = self._tiers[node.tier]
        self._origins.setdefault(node, (node.tier, node.block))
        del place.order[node]
        place.free.append(node.block)
        node.tier = -1
