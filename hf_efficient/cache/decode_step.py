"""`decode_step` and the other methods of a `PagedCache` for decoding loops other than transformers' own."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch

from hf_efficient.cache.bookkeeping.cache_state import DecodePlan
from hf_efficient.cache.over_pages import over_pages
from hf_efficient.cache.stores.kv_formats import GROUPED


class DecodeStepMixin:
    """Forwards whose bookkeeping is done before they run, forwards of token trees, and prompts run sequence by
    sequence."""

    layout: object = None  # another one whenever a `decode_step` may have moved what it touches (`static_tensors`)

    def attend_over_pages(self, wanted: bool = True) -> None:
        """Forwards over this cache read its pages though the model's config says "sdpa". Run each of them inside
        `forward_context`."""
        for state in self.states:
            state.over_pages = wanted

    def forward_context(self):
        """A context for one forward over this cache, in which the attention is what `attend_over_pages` asked for."""
        return over_pages(self.state.over_pages)

    @contextmanager
    def decode_step(self, width: int = 1, tree_mask: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Does the bookkeeping for one forward of `width` new tokens in every sequence, before that forward runs.

        The forward then touches only tensors that stay where they are, so it can be compiled once with
        `fullgraph=True`. Neither it nor this method waits for the device. Run exactly one forward inside, compiled or a
        replayed CUDA graph, without `attention_mask`. When it raises, the cache is as before; but when the memory for a
        growing pool is missing, every later use raises RuntimeError until `reset()`.

        A pool of fixed size (`num_blocks`) keeps its tensors until `reset()`. A growing pool replaces them now and
        then: a compiled forward is then compiled again, and a captured CUDA graph is not valid any more.

        Args:
            tree_mask: int64 [B, width] where the new tokens are a token tree: bit j of [b, i] says that token i sees
                token j (see `token_tree`).

        Yields:
            int64 [B, width], the positions of the new tokens. For a tree the caller makes its own.

        Raises:
            RuntimeError: before the first forward (run the prompt as usual), or when the model's attention does not
                read pages.
            ValueError: a pool of fixed size is full; nothing is changed.
        """
        self._check_step()
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"width={width!r}: must be a positive integer")
        sequences, state = len(self.state.pool.lengths), self.state
        with self._planned(lambda: state.plan_tokens(sequences, width, None), lambda: state.crop(-width)):
            position_ids = self._first_tables.position_ids(width)
            if position_ids.is_cuda:
                for tensor in (position_ids, *self.static_tensors()):
                    torch._dynamo.mark_static_address(tensor, guard=False)  # or CUDA graphs would copy it
            for each in self.states:
                each.decode_plan = DecodePlan(sequences, width, tree_mask)
            yield position_ids
        state.check_consumed()

    @contextmanager
    def packed_step(self, counts: list[int], width: int, tree_mask: torch.Tensor | None = None) -> Iterator[None]:
        """As `decode_step`, for one forward on a CPU of int64 [1, width] tokens in which sequence b has `counts[b]` new
        ones, 0 or more, end to end. What stands behind the last sequence is padding.

        Args:
            tree_mask: int64 [1, width], as in `decode_step`: bit j says that a token sees number j of the new ones of
                its sequence.

        Raises as `decode_step`, and RuntimeError for a cache of kv_format "int4" or "int2" or on another device, and
        ValueError for counts that are not one for each sequence, all 0, or more than `width` together, or that have
        more than 64 tokens of a sequence with `tree_mask`.
        """
        self._check_step()
        devices = {str(layer.device) for layer in self._paged_layers if layer.device.type != "cpu"}
        if devices or self.kv_format in GROUPED:
            raise RuntimeError(
                f"packed_step() is not possible with PagedCache(kv_format={self.kv_format!r}) on "
                f'{", ".join(sorted(devices)) or "cpu"}: allowed are "auto", "int8" and "fp8" on a CPU'
            )
        held, state = list(self.state.lengths), self.state
        if len(counts) != len(held) or min(counts) < 0 or not 0 < sum(counts) <= width:
            raise ValueError(
                f"counts={counts}, width={width}: needs numbers of new tokens of {len(held)} sequences, at least one "
                "token and at most `width` together"
            )
        if tree_mask is not None and max(counts) > 64:
            raise ValueError(f"counts={counts}: with tree_mask a sequence has at most 64 new tokens, one for each bit")
        with self._planned(lambda: state.plan_packed(counts), lambda: state.rewind(held)):
            starts, layers = list(accumulate(counts, initial=0)), self._paged_layers
            for tables in {id(layer.tables): layer.tables for layer in layers}.values():
                tables.query_starts.copy_(torch.tensor(starts, dtype=torch.int32))
            for each, layer in {id(layer.state): (layer.state, layer) for layer in layers}.values():
                each.decode_plan = DecodePlan(1, width, tree_mask, layer.tables.query_starts)
            yield
        state.check_consumed()

    def _check_step(self) -> None:
        """Raises RuntimeError where no `decode_step` is possible now."""
        state = self.state
        state.check_idle()
        if self.eviction is not None:
            raise RuntimeError("decode_step() is not possible with PagedCache(eviction=...): its blocks move")
        if self.recurrent_layers:
            raise RuntimeError("decode_step() is not possible with layers that have a recurrent state")
        if not state.reads_pages:
            raise RuntimeError(
                f"decode_step() needs attn_implementation='flash_paged' and a model whose attention reads pages, not "
                f"{state.attention!r}"
            )
        is_uneven = any(set(each.took_part) != {state.num_forwards} for each in self.states)
        if (is_uneven or not state.num_forwards) and not all(layer.is_initialized for layer in self._paged_layers):
            raise RuntimeError("decode_step() continues a filled cache: run the prompt through the model first")
        if is_uneven:
            raise RuntimeError("decode_step() after a forward that failed halfway: call reset() and begin anew")

    @contextmanager
    def _planned(self, plan, take_back) -> Iterator[None]:
        """Inside, the bookkeeping of a forward is done. `take_back` undoes `plan` after an error."""
        state, steady = self.state, self.state.steady
        plan()
        is_steady = steady is not None and steady == self._steady()
        layers = [] if is_steady else self._paged_layers
        self._count(-1)
        for layer in layers:  # what fails here, for want of memory, leaves a cache that only reset() helps
            layer.make_room(layer.state.plan)
        self._count(state.num_forwards)
        try:
            for layer in layers:
                layer.store.make_ready(layer.state.plan)
                layer.tables = layer.state.tables_on(layer.device)
            if not is_steady:
                self.layout, self._first_tables = object(), layers[0].tables
            yield
        except BaseException:
            for each in self.states:
                each.decode_plan = each.pending = None
            take_back()
            self._rewind_stores()
            raise
        for each in self.states:
            each.decode_plan = None
        if not is_steady:
            steady = None if any(layer.store.takes_steps for layer in layers) else self._steady()
        state.steady = steady

    def _count(self, forwards: int) -> None:
        """Every layer took part in so many forwards."""
        for state in self.states:
            state.took_part[:] = [forwards] * len(state.took_part)

    def _steady(self) -> tuple | None:
        """As `CacheState.steady`, after a forward was planned; None where that one changes pages."""
        parts = []
        for state in self.states:
            change = state.plan.change
            if change.moves is not None or change.copies or state.plan.dropped is not None:
                return None
            parts += [change.capacity, len(state.plan.starts), *state.tables.values()]
        return tuple(parts)

    @property
    def takes_trees(self) -> bool:
        """Whether `token_tree` and `keep` are possible: not with `eviction`, nor with int4 and int2 pages, whose tokens
        are quantized in groups, nor with layers that have a recurrent state."""
        return self.eviction is None and self.kv_format not in ("int4", "int2") and not self.recurrent_layers

    @contextmanager
    def token_tree(self, seen: torch.Tensor) -> Iterator[None]:
        """For one forward whose new tokens are a tree in every sequence. `keep` afterwards keeps one path of it.

        A node stands behind the tokens that it sees: pass `position_ids` of the sequence's last token plus their
        number. Attention implementations that do not read pages also need a 4-D mask.

        Args:
            seen: bool [B, S, S], which of the S new tokens each of them sees, itself included. All see the earlier
                tokens.

        Raises ValueError when not `takes_trees`.
        """
        if not self.takes_trees:
            others = ", eviction=..." if self.eviction is not None else ""
            raise ValueError(
                "a token tree needs a PagedCache of attention layers, without eviction, whose pages are in the model's "
                f"dtype, int8 or fp8, not kv_format={self.kv_format!r}{others}"
            )
        for state in self.states:
            state.tree = seen
        try:
            yield
        finally:
            for state in self.states:
                state.tree = None

    def keep(self, columns: list[list[int]], widths: int | list[int]) -> None:
        """Of the last `widths[b]` tokens of sequence b, keeps those numbered `columns[b]` (ascending from 0), one
        behind the other, and forgets the rest. widths: one for each sequence, or the same for all."""
        self.state.check_idle()
        widths = [widths] * len(columns) if isinstance(widths, int) else widths
        starts = [length - width for length, width in zip(self.state.lengths, widths)]
        lengths = [start + len(kept) for start, kept in zip(starts, columns)]
        self._check_rewind(lengths)
        moved = [(b, old, new) for b, kept in enumerate(columns) for new, old in enumerate(kept) if old != new]
        if moved:
            for state in self.states:
                slots = [state.pool.slots(b, starts[b], width) for b, width in enumerate(widths)]
                sources, destinations = zip(*((slots[b][old], slots[b][new]) for b, old, new in moved))
                for layer in self._paged_layers:
                    if layer.state is state and layer.is_initialized:
                        layer.store.move(sources, destinations)
            if self.row_tokens is not None:
                self.row_tokens.keep(starts, columns)
        self.state.rewind(lengths)
        self._rewind_stores()

    def fill(self, layers: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor | None) -> None:
        """Stores the keys [B, H, S, D] and values [B, H, S, Dv] of every layer, of prompts that ran over another cache.

        mask: [B, S], 0 at padding, which is not stored; None for none. Raises RuntimeError where this cache holds
        tokens already or evicts some, or the model's attention does not read its pages.
        """
        self.state.check_idle()
        if any(self.state.lengths) or not self.state.reads_pages or self.eviction is not None:
            raise RuntimeError("fill() takes an empty cache without eviction, whose pages the attention reads")
        for layer, (key, value) in zip(self._paged_layers, layers, strict=True):
            plan = layer.join_plan(key.shape[0], key.shape[2], mask)
            layer.prepare(plan, key, value)
            layer.store.write(plan, key, value)

    def static_tensors(self) -> list[torch.Tensor]:
        """What a forward under `decode_step` touches; with a pool of fixed size the same tensors until `reset()`."""
        tensors, tables = [], {}
        for layer in self._paged_layers:
            tensors += layer.store.static_tensors()
            tables[id(layer.tables)] = layer.tables  # layers share them
        return tensors + [x for each in tables.values() for x in (each.block_table, each.cache_seqlens, each.columns)]

    @contextmanager
    def only(self, rows: list[int], batch: int) -> Iterator[None]:
        """Inside, the cache consists of the empty sequences `rows` of a batch, in any order, whose prompts run apart
        from those of the others. Afterwards all sequences stand at the left, and the next forward needs `position_ids`
        of its own, as after `rewind`.

        Raises ValueError for a pool that grows, for layers that drop tokens, and for sequences that hold tokens or do
        not exist.
        """
        self.state.check_idle()
        lengths = self.state.lengths or [0] * batch
        fixed = self.state.pool.num_blocks is not None and self.row_tokens is None and self.eviction is None
        if not fixed or len(self.states) > 1 or self.state.window is not None:
            raise ValueError(
                "only() needs PagedCache(num_blocks=...) of layers that see all tokens, without eviction and prefixes"
            )
        if len(lengths) != batch or len(set(rows)) < len(rows) or any(not 0 <= r < batch or lengths[r] for r in rows):
            raise ValueError(
                f"only(rows={rows}, batch={batch}): needs different empty rows, and the rows hold {lengths} tokens"
            )
        with self.state.only(rows, batch):
            yield
