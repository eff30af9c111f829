"""PrefixTree against a dictionary of sequences, and its evictions against the definition of least recently used."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_efficient.cache.bookkeeping.prefix_tree import UNKNOWN, PrefixTree


class DictionaryModel:
    """Every stored beginning with its block and the time of its last use."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.stored: dict[tuple, list] = {}  # (key, tokens) of whole blocks -> [block, last use]
        self.time = 0

    def beginnings(self, key, tokens):
        tokens = tokens[: tokens.index(UNKNOWN)] if UNKNOWN in tokens else tokens
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(key, tuple(tokens[:end])) for end in ends]

    def use(self, beginnings):
        for beginning in reversed(beginnings):  # the first block of a sequence is the last used
            self.time += 1
            self.stored[beginning][1] = self.time

    def match(self, key, tokens):
        found = [beginning for beginning in self.beginnings(key, tokens) if beginning in self.stored]
        self.use(found)
        return [self.stored[beginning][0] for beginning in found]

    def victim(self, kept):
        leaves = [
            (use, key, tokens)
            for (key, tokens), (_, use) in self.stored.items()
            if (key, tokens) not in kept
            and not any(k == key and t != tokens and t[: len(tokens)] == tokens for k, t in self.stored)
        ]
        return min(leaves)[1:] if leaves else None

    def insert(self, key, tokens, filled):
        """`filled`: what the tree answered. Checks it, and takes its choice among the free blocks."""
        beginnings = self.beginnings(key, tokens)
        self.match(key, tokens)
        missing = [(place, b) for place, b in enumerate(beginnings) if b not in self.stored]
        expected_victims = []
        for place, beginning in missing:
            if len(self.stored) == self.num_blocks:
                victim = self.victim(set(beginnings))
                if victim is None:
                    break
                expected_victims.append(self.stored.pop(victim)[0])
                assert filled.get(place) == expected_victims[-1]
            assert place in filled
            assert filled[place] not in [block for block, _ in self.stored.values()]
            self.stored[beginning] = [filled.pop(place), 0]
        assert not filled
        self.use([b for b in beginnings if b in self.stored])


tokens = st.lists(st.sampled_from([0, 0, 0, 1, 2, UNKNOWN]), max_size=14)
operations = st.lists(
    st.tuples(st.sampled_from(["match", "insert", "insert"]), st.sampled_from("ab"), tokens), max_size=40
)


@settings(max_examples=300, deadline=None)
@given(num_blocks=st.integers(1, 7), block_size=st.integers(1, 3), operations=operations)
def test_against_a_dictionary(num_blocks, block_size, operations):
    tree, model = PrefixTree(num_blocks, block_size), DictionaryModel(num_blocks, block_size)
    for operation, key, sequence in operations:
        if operation == "match":
            assert [node.block for node in tree.match(key, sequence)] == model.match(key, sequence)
        else:
            filled = {number: node.block for number, node in tree.insert(key, sequence)}
            model.insert(key, sequence, filled)
        assert tree.num_used == len(model.stored) <= num_blocks
    for key, sequence in list(model.stored):
        assert [node.block for node in tree.match(key, sequence)] == model.match(key, list(sequence))
    tree.clear()
    assert tree.num_used == 0 and tree.match("a", [0] * 14) == []


def test_sequences_part_between_blocks():
    tree = PrefixTree(8, 2)
    assert [place for place, _ in tree.insert("k", [1, 2, 3, 4, 5])] == [0, 1]
    assert [place for place, _ in tree.insert("k", [1, 2, 3, 9])] == [1]
    first, second = tree.match("k", [1, 2, 3, 4]), tree.match("k", [1, 2, 3, 9, 9, 9])
    assert first[0] == second[0] and first[1] != second[1] and tree.num_used == 3
    assert tree.match("k", [1]) == tree.match("k", [2, 1]) == tree.match("other", [1, 2]) == []


@pytest.mark.parametrize("place", range(4))
def test_nothing_behind_an_unknown_token(place):
    tree, sequence = PrefixTree(8, 2), [1, 2, 3, 4]
    sequence[place] = UNKNOWN
    assert len(tree.insert("k", sequence)) == place // 2
    assert len(tree.match("k", sequence)) == place // 2


def test_the_least_recently_used_end_goes_first():
    tree = PrefixTree(4, 1)
    tree.insert("k", [1, 2])
    tree.insert("k", [3, 4])
    tree.match("k", [1, 2])
    tree.insert("k", [5])  # takes the block of 4, the end of the sequence that was not used
    assert [len(tree.match("k", s)) for s in ([1, 2], [3, 4], [5])] == [2, 1, 1] and tree.num_evicted == 1


def test_a_sequence_longer_than_the_pool_keeps_its_beginning():
    tree = PrefixTree(3, 1)
    tree.insert("k", [7, 8])
    assert [place for place, _ in tree.insert("k", [1, 2, 3, 4, 5])] == [0, 1, 2]
    assert len(tree.match("k", [1, 2, 3, 4, 5])) == 3 and tree.num_evicted == 2
    assert tree.insert("k", [1, 2, 3, 4, 5]) == []


@settings(max_examples=200, deadline=None)
@example([1, 2, 2], [("insert", "b", [0] * 4), ("insert", "a", [0] * 6), ("insert", "b", [0] * 6)])
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3), operations=operations)
def test_tiers_keep_what_a_longer_pool_would(sizes, operations):
    """Contents follow the moves: every block found holds what was put there. Nothing lies above what it continues."""
    tree = PrefixTree(sizes[0], 2)
    tree.sizes = sizes
    tree.clear()
    contents = {}
    for operation, key, sequence in operations:
        if operation == "insert":
            filled = tree.insert(key, sequence)
            moves = tree.moves()
            kept = {node: contents[tier, block] for node, tier, block in moves}
            for node, content in kept.items():
                assert node.tier > 0
                contents[node.tier, node.block] = content
            for number, node in filled:
                contents[node.tier, node.block] = key, tuple(sequence[: 2 * number + 2])
        path = tree.match(key, sequence)
        assert [node.tier for node in path] == sorted(node.tier for node in path)
        for number, node in enumerate(path):
            assert contents[node.tier, node.block] == (key, tuple(sequence[: 2 * number + 2]))
        if operation == "insert":
            known = sequence[: sequence.index(UNKNOWN)] if UNKNOWN in sequence else sequence
            assert [node.tier for node in path[: sizes[0]]] == [0] * min(sizes[0], len(known) // 2)
            if len(path) < len(known) // 2:  # its own blocks take what lies from its end on
                lower = [node for node in tree.nodes() if node.tier >= path[-1].tier]
                assert set(lower) <= set(path) and len(lower) == sum(sizes[path[-1].tier :])
        places = [(node.tier, node.block) for node in tree.nodes()]
        assert len(set(places)) == len(places) and all(block < sizes[tier] for tier, block in places)


def test_what_is_not_used_sinks_and_comes_back():
    tree = PrefixTree(2, 1)
    tree.sizes = [2, 1, 1]
    tree.clear()
    tiers = lambda *tokens: [node.tier for node in tree.match("k", tokens)]  # noqa: E731
    for sequence in ([1, 2], [3, 4]):
        tree.insert("k", sequence)
    assert tiers(1, 2) == [1, 2] and tiers(3, 4) == [0, 0]
    assert [number for number, _ in tree.insert("k", [1, 2])] == [0, 1]
    assert tiers(1, 2) == [0, 0] and tiers(3, 4) == [1, 2]
    tree.insert("k", [5])
    assert tiers(1, 2) == [0, 1] and tiers(3, 4) == [2]  # the end of both made room
