"""Random operations on a PagedCache against a plain list of tokens a sequence: nothing is lost, leaked or freed twice.

The key of token t at position p is (t, p), so that every read can be checked. There is no model: a forward is what a
layer does under the paged attention, without the attention. A part of the cache with operations of its own (eviction,
offload, a prefix cache) subclasses `CacheMachine`, with rules for these and a `make_cache` or `read` of its own.
"""

import copy
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn.utils.rnn import pad_sequence
from transformers import Gemma2Config

from hf_efficient import PagedCache
from hf_efficient.cache.bookkeeping import cache_state


EXAMPLES, STEPS = 150, 100
WINDOW, REWINDABLE, MAX_BATCH, MAX_LENGTH = 8, 6, 5, 150
SEQUENCES = st.lists(st.integers(0, MAX_BATCH - 1), min_size=1, max_size=MAX_BATCH)
COUNTS = st.lists(st.integers(0, 40), min_size=MAX_BATCH, max_size=MAX_BATCH)


def stored(tokens: torch.Tensor, start: torch.Tensor | int, sign: int) -> torch.Tensor:
    """What is stored of `tokens` [..., n] from the positions `start` [..., 1] on: [..., n, 1, 2]."""
    positions = (torch.arange(tokens.shape[-1]) + start).expand_as(tokens)
    return torch.stack([sign * tokens, positions], -1).float()[..., None, :]


class CacheMachine(RuleBasedStateMachine):
    """Layer 0 sees `WINDOW` tokens, layer 1 all. sequences: the tokens of each sequence, what the cache must hold."""

    steps_taken = 0

    def make_cache(self, block_size: int, num_blocks: int | None) -> PagedCache:
        config = Gemma2Config(num_hidden_layers=2, sliding_window=WINDOW)
        config._attn_implementation = "flash_paged"
        return PagedCache(config, block_size=block_size, num_blocks=num_blocks)

    def read(self, layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, n, 1, 2] of what `layer` holds of each sequence, any n that is enough."""
        tables = pad_sequence([torch.tensor(table) for table in layer.state.pool.tables], True).long()
        pages = layer.store.pages["keys"], layer.store.pages["values"]
        return tuple(page[tables].flatten(1, 2) for page in pages)

    def check(self, layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys` and `values` [B, n, 1, 2] of `layer` are what they must be."""
        dropped = torch.tensor(layer.state.pool.dropped)[:, None]
        lengths = torch.tensor(list(map(len, self.sequences)))[:, None] - dropped
        tokens = pad_sequence([sequence[n:] for sequence, n in zip(self.sequences, layer.state.pool.dropped)], True)
        there = (torch.arange(tokens.shape[1]) < lengths)[..., None, None]
        for sign, read in ((1, keys), (-1, values)):
            wrong = (read[:, : tokens.shape[1]] != stored(tokens, dropped, sign)) & there
            assert not wrong.any(), wrong.nonzero()

    @initialize(block_size=st.sampled_from([8, 16]), num_blocks=st.sampled_from([None, None, 24, 60]))
    def start(self, block_size, num_blocks):
        self.patch = mock.patch.object(cache_state, "REWINDABLE", REWINDABLE)  # or sequences would have to be long
        self.patch.start()
        self.cache = self.make_cache(block_size, num_blocks)
        self.sequences: list[torch.Tensor] = []
        self.next_token = self.highest = 0

    def forward(self, counts: list[int], write) -> None:
        """`write(layer, keys, values)` for both layers, of columns [B, 1, S, 2] that hold new tokens at the right."""
        width = max(counts)
        columns = self.next_token + torch.arange(len(counts) * width).view(-1, width)
        valid = torch.arange(width) >= width - torch.tensor(counts)[:, None]
        starts = torch.tensor(list(map(len, self.sequences))) + torch.tensor(counts) - width
        new = [stored(torch.where(valid, columns, -7), starts[:, None], sign).transpose(1, 2) for sign in (1, -1)]
        sequences = self.sequences
        self.sequences = [torch.cat([held, more[width - n :]]) for held, more, n in zip(sequences, columns, counts)]
        self.next_token += columns.numel()
        self.highest = max(self.highest, *map(len, self.sequences))
        try:
            for layer in self.cache.layers:
                write(layer, *new)
        except ValueError:
            self.sequences = sequences
            raise

    def snapshot(self) -> list:
        return [
            (copy.deepcopy((s.pool.tables, s.pool.lengths, s.pool.dropped, s.pool.ref_count)), s.columns)
            for s in self.states
        ]  # fmt: skip

    def refused(self, operation) -> bool:
        """Whether it raised ValueError, which must change nothing."""
        before = self.snapshot()
        try:
            operation()
            return False
        except ValueError:
            assert self.snapshot() == before
            return True

    @property
    def states(self):
        return self.cache.states

    @property
    def is_full(self) -> bool:
        return self.cache.state.pool.num_blocks is not None

    @rule(counts=COUNTS, batch=st.integers(1, MAX_BATCH), even=st.booleans(), one=st.booleans())
    def append(self, counts, batch, even, one):
        batch = len(self.sequences) or batch
        counts = [min(count, 1) if one else count for count in counts[:batch]]
        counts = [max(counts)] * batch if even else counts
        width = max(counts)
        if width == 0 or max(map(len, self.sequences), default=0) > MAX_LENGTH:
            return
        state = self.cache.state
        mask = state.column_mask
        if mask is None:
            lengths = torch.tensor(state.lengths or [0] * batch)
            mask = torch.arange(state.columns) >= state.columns - lengths[:, None]
        mask = torch.cat([mask, torch.arange(width) >= width - torch.tensor(counts)[:, None]], 1)
        mask = None if even and state.column_mask is None else mask
        held = self.sequences
        self.sequences = self.sequences or [torch.zeros(0, dtype=torch.long)] * batch

        def write(layer, keys, values):
            step = layer.join_plan(batch, width, mask)
            layer.prepare(step, keys, values)
            layer.store.write(step, keys, values)
            self.check(layer, *(read.transpose(1, 2) for read in layer.store.read(step)))
            self.check_tables(layer, step)

        if self.refused(lambda: self.forward(counts, write)):
            assert self.is_full
            self.sequences = held
            self.shorten([0] * len(held), self.cache.rewind)  # that is possible at any time

    @precondition(lambda self: self.sequences and self.cache.layers[0].is_initialized)
    @rule(width=st.integers(1, 3))
    def decode_step(self, width):
        lengths = list(map(len, self.sequences))

        def decode():
            with self.cache.decode_step(width) as positions:
                assert positions.tolist() == [list(range(n, n + width)) for n in lengths]
                self.forward([width] * len(lengths), lambda layer, *new: layer.store.write(layer.state.plan, *new))

        if self.refused(decode):
            assert self.is_full
        elif max(lengths) > MAX_LENGTH:
            self.reset()

    def check_tables(self, layer, step) -> None:
        """The device sees what the host does."""
        state, tables = layer.state, layer.state.tables_on(torch.device("cpu"))
        assert tables.cache_seqlens.tolist() == step.starts
        assert tables.columns.item() == state.previous_columns
        for sequence, table in enumerate(state.pool.tables):
            assert tables.block_table[sequence, : len(table)].tolist() == table

    @rule(sequences=SEQUENCES)
    def select(self, sequences):
        """Reorders, forks and frees."""
        if self.sequences:
            sequences = [sequence % len(self.sequences) for sequence in sequences]
            self.cache.batch_select_indices(torch.tensor(sequences))
            self.sequences = [self.sequences[sequence] for sequence in sequences]

    @rule(keep=st.lists(st.booleans(), min_size=MAX_BATCH, max_size=MAX_BATCH))
    def free_sequences(self, keep):
        keep = keep[: len(self.sequences)]
        if any(keep):
            self.cache.batch_select_indices(torch.tensor(keep))
            self.sequences = [sequence for sequence, kept in zip(self.sequences, keep) if kept]

    @precondition(lambda self: len(self.sequences) in (1, 2))
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.sequences = [sequence for sequence in self.sequences for _ in range(2)]

    @precondition(lambda self: self.sequences)
    @rule(counts=COUNTS, deep=st.booleans())
    def rewind(self, counts, deep):
        counts = counts if deep else [min(count, 5) for count in counts]
        lengths = [max(0, len(sequence) - count) for sequence, count in zip(self.sequences, counts)]
        self.shorten(lengths, self.cache.rewind)

    @precondition(lambda self: self.sequences)
    @rule(removed=st.integers(0, 50))
    def crop(self, removed):
        mask = self.cache.state.column_mask
        if mask is None:
            lengths = [max(0, len(sequence) - removed) for sequence in self.sequences]
        else:
            lengths = mask[:, : max(0, mask.shape[1] - removed)].sum(1).tolist()
        self.shorten(lengths, lambda _: self.cache.crop(-removed))

    def shorten(self, lengths, operation):
        if self.refused(lambda: operation(lengths)):
            dropped = self.states[-1].pool.dropped
            assert any(n < d + WINDOW - 1 for n, d in zip(lengths, dropped) if n)
            assert any(self.highest - n > REWINDABLE for n in lengths)
        else:
            self.sequences = [sequence[:length] for sequence, length in zip(self.sequences, lengths)]

    @rule(really=st.integers(0, 4))
    def reset(self, really=0):
        if really == 0:
            self.cache.reset()
            self.sequences = []

    @invariant()
    def everything_is_there(self):
        if not hasattr(self, "cache"):
            return
        CacheMachine.steps_taken += 1
        assert self.cache.cache_seqlens == [len(sequence) for sequence in self.sequences]
        for layer in self.cache.layers:
            pool, window = layer.state.pool, layer.state.window
            if layer.is_initialized and self.sequences:
                assert layer.store.capacity == pool.capacity
                self.check(layer, *self.read(layer))
            for sequence, dropped in zip(self.sequences, pool.dropped):
                assert dropped <= max(0, len(sequence) - window + 1) if window else dropped == 0
        for state in self.states:
            check_pool(state.pool)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.stop()
        if hasattr(self, "cache") and self.sequences:
            self.cache.rewind([0] * len(self.sequences))
            for state in self.states:
                assert not any(state.pool.ref_count) and state.pool.num_free == state.pool.capacity


def check_pool(pool) -> None:
    counts = [0] * pool.capacity
    for table, length, is_contiguous in zip(pool.tables, pool.lengths, pool.is_contiguous):
        assert len(table) == pool.blocks_for(length) and len(set(table)) == len(table)
        assert not is_contiguous or all(b == a + 1 for a, b in zip(table, table[1:]))
        for block in table:
            counts[block] += 1
    assert counts == pool.ref_count and pool.num_free == counts.count(0)
    assert pool.num_blocks is None or pool.capacity == pool.num_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True, database=None
)


def test_ten_thousand_steps():
    if CacheMachine.steps_taken == 0:  # run alone
        TestCacheMachine("runTest").runTest()
    assert CacheMachine.steps_taken >= 10_000
