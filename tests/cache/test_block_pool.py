"""The bookkeeping of the paged cache, against sequences kept as plain Python lists."""

import random

import pytest

from hf_efficient.cache.bookkeeping.block_pool import BlockPool


class Storage:
    """Slots that hold one token each, driven by what a BlockPool says."""

    def __init__(self, pool):
        self.pool, self.slots = pool, {}

    def append(self, tokens):
        starts = list(self.pool.lengths)
        change = self.pool.append([len(sequence) for sequence in tokens])
        size = self.pool.block_size
        if change.moves is not None:
            moved_to = {old + i: new + i for old, new, number in change.moves for i in range(number)}
            assert len(set(moved_to.values())) == len(moved_to)
            self.slots = {
                moved_to[s // size] * size + s % size: t for s, t in self.slots.items() if s // size in moved_to
            }
        for source, destination in change.copies:
            for offset in range(size):
                self.slots.pop(destination * size + offset, None)
                if source * size + offset in self.slots:
                    self.slots[destination * size + offset] = self.slots[source * size + offset]
        for sequence, start, table in zip(tokens, starts, self.pool.tables):
            for position, token in enumerate(sequence, start):
                assert table[position // size] < change.capacity
                self.slots[table[position // size] * size + position % size] = token
        return change

    def sequence(self, sequence):
        size, table = self.pool.block_size, self.pool.tables[sequence]
        return [self.slots[table[i // size] * size + i % size] for i in range(self.pool.lengths[sequence])]


def check_invariants(pool):
    counts = [0] * pool.capacity
    for table, length, is_contiguous in zip(pool.tables, pool.lengths, pool.is_contiguous):
        assert len(table) == pool.blocks_for(length)
        assert len(set(table)) == len(table)
        assert not is_contiguous or all(b == a + 1 for a, b in zip(table, table[1:]))
        for block in table:
            counts[block] += 1
    assert counts == pool.ref_count
    assert pool.num_free == counts.count(0)


@pytest.mark.parametrize("num_blocks", [None, 40])
@pytest.mark.parametrize("trial", range(20))
def test_random_operations_keep_every_row_and_leak_nothing(trial, num_blocks):
    rng = random.Random(trial)
    pool = BlockPool(rng.choice([2, 4, 8]), num_blocks)
    storage, expected, token = Storage(pool), [[] for _ in range(rng.randint(1, 4))], 0
    pool.add_sequences(len(expected))
    mirror, refused = {}, 0  # (sequence, index) -> block, as told by table_changes
    for _ in range(60):
        operation = rng.choice(["append"] * 4 + ["decode"] * 6 + ["rewind", "fork", "fork"])
        if operation in ("append", "decode"):
            width = 1 if operation == "decode" else rng.randint(0, 12)
            new = []
            for _ in expected:
                count = width if rng.random() < 0.7 else rng.randint(0, width)
                new.append(list(range(token, token + count)))
                token += count
            before = (pool.tables, pool.lengths, pool.ref_count)
            before = ([list(t) for t in before[0]], list(before[1]), list(before[2]))
            try:
                storage.append(new)
            except ValueError:
                refused += 1
                assert num_blocks is not None
                assert before == (pool.tables, pool.lengths, pool.ref_count)
                pool.rewind([length // 4 for length in pool.lengths])
                expected = [sequence[: len(sequence) // 4] for sequence in expected]
            else:
                expected = [sequence + more for sequence, more in zip(expected, new)]
        elif operation == "rewind":
            lengths = [rng.randint(len(sequence) // 2, len(sequence)) for sequence in expected]
            pool.rewind(lengths)
            expected = [sequence[:length] for sequence, length in zip(expected, lengths)]
        else:
            sequences = [rng.randrange(len(expected)) for _ in range(rng.randint(1, 5))]
            pool.fork(sequences)
            expected = [list(expected[sequence]) for sequence in sequences]
        check_invariants(pool)
        if rng.random() < 0.5:
            mirror.update({(sequence, index): block for sequence, index, block in pool.table_changes()})
            for sequence, table in enumerate(pool.tables):
                assert [mirror[sequence, index] for index in range(len(table))] == table
        assert [storage.sequence(sequence) for sequence in range(len(expected))] == expected
    pool.rewind([0] * len(expected))
    assert pool.num_free == pool.capacity
    if num_blocks is None:
        assert refused == 0


def test_rows_that_share_a_block_copy_it_only_when_they_write():
    pool = BlockPool(8)
    pool.add_sequences(1)
    pool.append([20])
    pool.fork([0, 0, 0])
    assert pool.capacity - pool.num_free == 3
    change = pool.append([1, 1, 1])
    assert len(change.copies) == 2  # the last of the three keeps the block
    assert pool.capacity - pool.num_free == 5
    assert len({table[-1] for table in pool.tables}) == 3 and len({table[0] for table in pool.tables}) == 1


def test_only_what_changed_in_the_tables_is_told():
    pool = BlockPool(8, num_blocks=10)
    pool.add_sequences(2)
    pool.append([8, 12])
    assert [change[:2] for change in pool.table_changes()] == [(0, 0), (1, 0), (1, 1)]
    pool.append([1, 1])
    assert pool.table_changes() == [(0, 1, pool.tables[0][1])]
    pool.rewind([9, 8])
    pool.append([0, 1])
    assert pool.table_changes() == [(1, 1, pool.tables[1][1])]


def test_full_blocks_are_never_copied():
    pool = BlockPool(8)
    pool.add_sequences(1)
    pool.append([16])
    pool.fork([0, 0])
    assert pool.append([1, 1]).copies == []


def test_rows_of_a_growing_pool_stay_in_one_piece():
    pool = BlockPool(8)
    pool.add_sequences(3)
    pool.append([20, 20, 20])
    for _ in range(300):
        pool.append([1, 1, 1])
        assert all(pool.is_contiguous)
    assert pool.capacity <= 4 * (pool.capacity - pool.num_free)


def test_rows_of_a_fixed_pool_stay_in_one_piece():
    """Each has an equal share of the blocks, also one whose prompt runs apart from the others."""
    pool = BlockPool(4, 8)
    pool.add_sequences(2)
    with pool.only([1]):
        pool.append([4])
    assert pool.tables == [[], [4]]
    pool.rewind([0, 0])
    for _ in range(3):
        pool.append([4, 4])
    assert pool.tables == [[0, 1, 2], [4, 5, 6]] and all(pool.is_contiguous)


def test_one_long_row_does_not_make_room_for_all():
    pool = BlockPool(8)
    pool.add_sequences(8)
    pool.append([8 * 1000] + [8] * 7)
    assert pool.capacity <= 2 * 1007


def test_too_small_a_pool_says_how_many_blocks_are_needed():
    pool = BlockPool(16, num_blocks=4)
    pool.add_sequences(2)
    pool.append([16, 16])
    with pytest.raises(ValueError, match=r"num_blocks=4.*needs 6 blocks \(2 in use and 4 more\)"):
        pool.append([32, 32])
    assert pool.lengths == [16, 16] and pool.num_free == 2
    pool.append([16, 16])
    assert pool.num_free == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"capacity": 9}, "9 blocks in a pool of 8"),
        ({"tables": [[0], [4, 4]]}, "sequence 1 has 6 tokens and the blocks"),
        ({"lengths": [4, 9]}, "sequence 1 has 9 tokens and the blocks"),
        ({"tables": [[8], [4, 5]]}, "sequence 0 has block 8, and there are the blocks 0 to 7"),
        ({"dropped": [0]}, "tokens dropped, of 2 sequences"),
        ({"dropped": [0, 2]}, "tokens dropped, of 2 sequences in blocks of 4"),
    ],
)
def test_a_snapshot_is_restored_and_an_altered_one_refused(changed, message):
    pool, other = BlockPool(4, 8), BlockPool(4, 8)
    pool.add_sequences(2)
    pool.append([4, 6])
    for _ in range(2):  # what was told of the tables before counts no longer
        other.restore(pool.snapshot())
        assert len(other.table_changes()) == 3
    assert other.snapshot() == pool.snapshot() and other.ref_count == pool.ref_count
    with pytest.raises(ValueError, match=message):
        other.restore({**pool.snapshot(), **changed})
    assert other.snapshot() == pool.snapshot()
