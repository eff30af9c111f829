"""Which blocks of a prefix cache hold which beginnings of token sequences: pure Python, no tensors.

Paper: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs (2312.07104), RadixAttention.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence


UNKNOWN = -1  # in place of a token id: the tree neither stores nor finds it, nor what follows it


class _Node:
    """One block. edge: its tokens; the path from the root holds those of the blocks before it."""

    __slots__ = ("block", "children", "edge", "parent")

    def __init__(self, parent: "_Node | None", edge: Hashable, block: int):
        self.parent, self.edge, self.block = parent, edge, block
        self.children: dict[Hashable, _Node] = {}


class PrefixTree:
    """A radix tree whose edges are whole blocks of tokens, so that sequences share the blocks of their common
    beginning.

    Sequences under different keys share nothing. When no block is free, the least recently used leaf makes room. Blocks
    have the ids 0 … num_blocks - 1.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all sequences."""
        self._root = _Node(None, None, -1)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        # From the least to the most recently used. A use marks a sequence's last block first, so that a block stands
        # behind all that continue it and the first one in this order is a leaf.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        return len(self._order)

    def match(self, key: Hashable, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest stored beginning of `tokens`, in order; marks them as used."""
        return [node.block for node in self._walk(self._edges(key, tokens))]

    def insert(self, key: Hashable, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Stores the whole blocks of `tokens`.

        Returns (number in the sequence, block) of those that were not there, which the caller has to fill. Where this
        sequence alone takes all blocks, its end is not stored.
        """
        edges = list(self._edges(key, tokens))
        path = self._walk(edges)
        known, node = len(path), path[-1] if path else self._root
        for edge in edges[known:]:
            if self._free:
                block = self._free.pop()
            else:
                oldest = next(iter(self._order))
                if oldest is node or oldest.children:  # all blocks are on this path
                    break
                block = self._evict(oldest)
            child = node.children[edge] = _Node(node, edge, block)
            self._order[child] = None
            path.append(child)
            node = child
        self._mark_used(path)
        return [(number, path[number].block) for number in range(known, len(path))]

    def _edges(self, key: Hashable, tokens: Sequence[int]) -> Iterator[Hashable]:
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            edge = tuple(tokens[start : start + self.block_size])
            if UNKNOWN in edge:
                return
            yield edge if start else (key, edge)

    def _walk(self, edges) -> list[_Node]:
        node, path = self._root, []
        for edge in edges:
            node = node.children.get(edge)
            if node is None:
                break
            path.append(node)
        self._mark_used(path)
        return path

    def _mark_used(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._order.move_to_end(node)

    def _evict(self, leaf: _Node) -> int:
        del self._order[leaf], leaf.parent.children[leaf.edge]
        self.num_evicted += 1
        return leaf.block
