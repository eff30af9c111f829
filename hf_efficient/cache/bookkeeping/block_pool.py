"""Which blocks of a paged key-value cache belong to which sequence: pure Python, no tensors.

Paper: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
(https://arxiv.org/abs/2309.06180).
"""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


_SMALL_POOL = 64  # blocks: pools up to this size are not shrunk
_ROOM = 8  # blocks left free behind a sequence of more than that, or an eighth of the sequence where that is more


class StorageChange(NamedTuple):
    """What the tensors have to do, in this order, before the tokens of an `append` are written.

    capacity: blocks that must exist.
    moves: (old, new, number) of runs of blocks to keep; None where all stay where they are.
    copies: (source, destination) of shared blocks that are written to.
    """

    capacity: int
    moves: list[tuple[int, int, int]] | None
    copies: list[tuple[int, int]]


class BlockPool:
    """Blocks of `block_size` tokens, shared between sequences by reference counts and copied when one of them writes.

    The blocks of a sequence are consecutive where that costs little, so that its tokens can be read without a gather. A
    growing pool (num_blocks None) leaves room behind sequences of about equal length, and moves them apart again when
    that room is used up. Where lengths are unequal or blocks are shared it leaves no room: it has at most 1/32 more
    blocks than are used (or one for each sequence), and gives back what forks and drops leave empty.

    tables, lengths: the blocks of each sequence, in order, and the tokens in them.
    dropped: tokens before these, which `drop` forgot. is_contiguous: whether its blocks follow one another.
    ref_count: for each block, how many sequences hold it; 0 when it is free.
    written: the blocks that have held tokens since the pool was last resized.
    """

    def __init__(self, block_size: int, num_blocks: int | None = None):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._starts: dict[int, int] | None = None  # inside `only`: the first block of each sequence
        self.reset()

    def reset(self) -> None:
        """Forgets all sequences. A growing pool has no blocks afterwards."""
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.dropped: list[int] = []
        self.is_contiguous: list[bool] = []
        self._reported: list[int] = []  # leading blocks of each sequence that `table_changes` has returned already
        self._resize([0] * (self.num_blocks or 0))

    def _resize(self, ref_count: list[int]) -> None:
        self.ref_count = ref_count
        self.written = {block for block, count in enumerate(ref_count) if count}
        self.free_block_ids = [block for block, count in enumerate(ref_count) if count == 0]  # ascending, so a heap
        self.num_free = len(self.free_block_ids)

    @property
    def capacity(self) -> int:
        """Blocks that exist now, used or free."""
        return len(self.ref_count)

    @property
    def total_lengths(self) -> list[int]:
        """Tokens of each sequence, dropped ones included."""
        return [length + dropped for length, dropped in zip(self.lengths, self.dropped)]

    def add_sequences(self, number: int) -> None:
        """Adds `number` empty sequences."""
        for _ in range(number):
            self.tables.append([])
            self.lengths.append(0)
            self.dropped.append(0)
            self.is_contiguous.append(True)
            self._reported.append(0)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def slots(self, sequence: int, first: int, number: int) -> list[int]:
        """The slots (block * block_size + offset) of `number` tokens of a sequence from its token `first` on."""
        size, first = self.block_size, first - self.dropped[sequence]
        table = self.tables[sequence]
        return [table[token // size] * size + token % size for token in range(first, first + number)]

    def append(self, counts: list[int]) -> StorageChange:
        """Makes room for `counts[b]` more tokens at the end of each sequence b.

        Raises ValueError, with nothing changed, when a pool of fixed size has too few free blocks.
        """
        size, copies = self.block_size, []
        demand = [self.blocks_for(n + c) - len(t) for n, c, t in zip(self.lengths, counts, self.tables)]
        if not any(demand) and all(self.ref_count[table[-1]] == 1 for table in self.tables if table):
            self.lengths = [length + count for length, count in zip(self.lengths, counts)]
            return StorageChange(self.capacity, None, copies)

        writers: dict[int, int] = {}  # shared, partly filled block -> sequences that write to it
        for length, count, table in zip(self.lengths, counts, self.tables):
            if count and length % size and self.ref_count[table[-1]] > 1:
                writers[table[-1]] = writers.get(table[-1], 0) + 1
        num_copies = sum(min(sequences, self.ref_count[block] - 1) for block, sequences in writers.items())
        required = sum(demand) + num_copies
        moves, starts = self._grow(demand, required)
        for sequence, (table, count) in enumerate(zip(self.tables, counts)):
            if count and self.lengths[sequence] % size and self.ref_count[table[-1]] > 1:
                source, destination = table[-1], self._take(None)
                self.ref_count[source] -= 1
                table[-1] = destination
                self._reported[sequence] = min(self._reported[sequence], len(table) - 1)
                self.is_contiguous[sequence] = len(table) == 1 or (
                    self.is_contiguous[sequence] and destination == table[-2] + 1
                )
                copies.append((source, destination))
            for _ in range(demand[sequence]):
                wanted = table[-1] + 1 if table else starts.get(sequence)
                block = self._take(wanted)
                self.is_contiguous[sequence] = not table or (self.is_contiguous[sequence] and block == wanted)
                table.append(block)
            self.lengths[sequence] += count
        return StorageChange(self.capacity, moves, copies)

    def _grow(self, demand: list[int], required: int) -> tuple[list[tuple[int, int, int]] | None, dict[int, int]]:
        """Makes at least `required` blocks free, and moves the sequences apart where that makes them contiguous.

        Returns the moves, and the first block of each empty sequence.
        """
        used = self.capacity - self.num_free
        total = used + required
        if self.num_blocks is not None and total > self.num_blocks:
            raise ValueError(
                f"PagedCache(num_blocks={self.num_blocks}, block_size={self.block_size}) is too small: this step needs "
                f"{total} blocks ({used} in use and {required} more), {total - self.num_blocks} more than there are. "
                "Nothing was changed. Free some with batch_select_indices(), rewind(), crop() or reset(), or make a "
                f"cache of {total} blocks or more, or one that grows (neither num_blocks nor memory)."
            )
        if self._starts is not None:
            return None, self._starts
        sequences, shared = len(self.tables), used != sum(map(len, self.tables))
        longest = max(len(table) + more for table, more in zip(self.tables, demand))
        if self.num_blocks is not None:
            room = self.num_blocks // sequences
            return None, {
                sequence: sequence * room for sequence in range(sequences)
            } if used == 0 and longest <= room else {}
        spare = longest * sequences - total
        apart = not shared and spare <= max(total // 4, min(total, _SMALL_POOL))
        room = longest + max(longest // 8, min(longest, _ROOM)) if apart else 0
        capacity = room * sequences if apart else total + max(total // 32, sequences)
        blocked = apart and any(
            more and not self._is_free_run(table[-1] + 1, more) for more, table in zip(demand, self.tables) if table
        )
        if used == 0 or blocked or self.capacity > max(capacity + capacity // 2, _SMALL_POOL):
            return self._place(capacity, room)
        if self.num_free < required:
            self._resize(self.ref_count + [0] * (capacity - self.capacity))
        return None, {}

    def _place(self, capacity: int, room: int) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
        """Moves to a pool of `capacity` blocks: sequence b from block b * room on, or without gaps when `room` is 0.

        Returns the moves, and the first block of each empty sequence.
        """
        new_ids: dict[int, int] = {}
        for sequence, table in enumerate(self.tables):
            for number, block in enumerate(table):
                new_ids.setdefault(block, sequence * room + number if room else len(new_ids))
            table[:] = [new_ids[block] for block in table]
            self._reported[sequence] = 0
            self.is_contiguous[sequence] = all(b == a + 1 for a, b in zip(table, table[1:]))
        ref_count = [0] * capacity
        for block in (block for table in self.tables for block in table):
            ref_count[block] += 1
        self._resize(ref_count)
        moves: list[tuple[int, int, int]] = []
        for old, new in new_ids.items():  # run by run
            if moves and (old, new) == (moves[-1][0] + moves[-1][2], moves[-1][1] + moves[-1][2]):
                moves[-1] = (*moves[-1][:2], moves[-1][2] + 1)
            else:
                moves.append((old, new, 1))
        return moves, {sequence: sequence * room for sequence, table in enumerate(self.tables) if room and not table}

    def _is_free_run(self, start: int, number: int) -> bool:
        return start + number <= self.capacity and not any(self.ref_count[start : start + number])

    def _take(self, wanted: int | None) -> int:
        """Takes a free block: `wanted` if that is free, else the lowest."""
        block = wanted
        while block is None or block >= self.capacity or self.ref_count[block]:
            block = heapq.heappop(self.free_block_ids)  # stale where the block was taken as `wanted` since
        self.ref_count[block] = 1
        self.written.add(block)
        self.num_free -= 1
        return block

    def _release(self, block: int) -> None:
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.num_free += 1
            heapq.heappush(self.free_block_ids, block)
            if len(self.free_block_ids) > 2 * self.capacity + 64:  # mostly stale entries
                self.free_block_ids = [b for b, count in enumerate(self.ref_count) if count == 0]

    def rewind(self, lengths: list[int]) -> None:
        """Shortens each sequence b to `lengths[b]` tokens, dropped ones included, and frees the blocks beyond."""
        for sequence, (table, length) in enumerate(zip(self.tables, lengths)):
            if length == 0:
                self.dropped[sequence] = 0
            length -= self.dropped[sequence]
            while len(table) > self.blocks_for(length):
                self._release(table.pop())
            self.lengths[sequence] = length
            self._reported[sequence] = min(self._reported[sequence], len(table))
            self.is_contiguous[sequence] = self.is_contiguous[sequence] or len(table) < 2

    def drop(self, tokens: list[int]) -> None:
        """Forgets the first `tokens[b]` tokens, whole blocks, of each sequence b."""
        for sequence, (table, number) in enumerate(zip(self.tables, tokens)):
            if number:
                for block in table[: number // self.block_size]:
                    self._release(block)
                del table[: number // self.block_size]
                self.lengths[sequence] -= number
                self.dropped[sequence] += number
                self._reported[sequence] = 0
                self.is_contiguous[sequence] = self.is_contiguous[sequence] or len(table) < 2

    def fork(self, sequences: list[int]) -> None:
        """Sequence i becomes what sequence `sequences[i]` was; one named twice is shared, one not named is freed."""
        tables = [list(self.tables[sequence]) for sequence in sequences]
        for table in tables:
            for block in table:
                self.ref_count[block] += 1
        for table in self.tables:
            for block in table:
                self._release(block)
        self.lengths = [self.lengths[sequence] for sequence in sequences]
        self.dropped = [self.dropped[sequence] for sequence in sequences]
        self.is_contiguous = [self.is_contiguous[sequence] for sequence in sequences]
        self.tables = tables
        self._reported = [0] * len(tables)

    @contextmanager
    def only(self, sequences: list[int]) -> Iterator[None]:
        """Inside, the pool, which must be of a fixed size, consists of `sequences` alone, in this order."""
        whole = {name: getattr(self, name) for name in ("tables", "lengths", "dropped", "is_contiguous")}
        for name, values in whole.items():
            setattr(self, name, [values[sequence] for sequence in sequences])
        self._reported = [0] * len(sequences)
        room = self.num_blocks // len(whole["tables"])  # where a forward of all would put them: no more pages are used
        self._starts = {index: sequence * room for index, sequence in enumerate(sequences)}
        try:
            yield
        finally:
            self._starts = None
            for name, values in whole.items():
                for sequence, value in zip(sequences, getattr(self, name)):
                    values[sequence] = value
                setattr(self, name, values)
            self._reported = [0] * len(self.tables)

    def snapshot(self) -> dict:
        """What `restore` needs, as JSON values."""
        return {"capacity": self.capacity, "tables": self.tables, "lengths": self.lengths, "dropped": self.dropped}

    def restore(self, snapshot: dict) -> None:
        """Makes this pool what another one of the same block size and `num_blocks` was.

        Raises ValueError, with nothing changed, for blocks that do not exist or stand twice in a sequence, and for
        tables that do not fit the lengths.
        """
        capacity, tables, lengths, dropped = (snapshot[name] for name in ("capacity", "tables", "lengths", "dropped"))
        if self.num_blocks not in (None, capacity):
            raise ValueError(f"{capacity} blocks in a pool of {self.num_blocks}")
        ref_count = [0] * capacity
        for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            if length < 0 or len(table) != self.blocks_for(length) or len(set(table)) != len(table):
                raise ValueError(
                    f"sequence {sequence} has {length} tokens and the blocks {table} of {self.block_size} tokens"
                )
            for block in table:
                if not 0 <= block < capacity:
                    raise ValueError(
                        f"sequence {sequence} has block {block}, and there are the blocks 0 to {capacity - 1}"
                    )
                ref_count[block] += 1
        if len(dropped) != len(tables) or any(number < 0 or number % self.block_size for number in dropped):
            raise ValueError(f"{dropped} tokens dropped, of {len(tables)} sequences in blocks of {self.block_size}")
        self.reset()
        self.add_sequences(len(tables))
        self.tables, self.lengths, self.dropped = [list(table) for table in tables], list(lengths), list(dropped)
        self.is_contiguous = [all(b == a + 1 for a, b in zip(table, table[1:])) for table in tables]
        self._resize(ref_count)

    def table_changes(self) -> list[tuple[int, int, int]]:
        """(sequence, index in its table, block) of the table entries that have changed since the last call."""
        changes = [
            (sequence, index, table[index])
            for sequence, (table, first) in enumerate(zip(self.tables, self._reported))
            for index in range(first, len(table))
        ]
        self._reported = [len(table) for table in self.tables]
        return changes
