"""What a `PagedCache` offers to decoding loops other than that of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_efficient.cache.bookkeeping.cache_state import PlannedForward
from hf_efficient.cache.over_pages import over_pages


class OwnLoops:
    """Forwards whose bookkeeping is done before, forwards of token trees, and prompts that are not all run at once."""

    def attend_over_pages(self, wanted: bool = True) -> None:
        """Forwards over this cache read its pages though the model's config says "sdpa". Run each of them inside
        `forward_context`."""
        for state in self.states:
            state.over_pages = wanted

    def forward_context(self):
        """For a forward of the model over this cache: a context in which its attention is the one this cache counts on."""
        return over_pages(self.state.over_pages)

    @contextmanager
    def decode_step(self, width: int = 1, tree_mask: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Does the bookkeeping for one forward of `width` new tokens in every row before that forward runs, which then
        only touches tensors that stay where they are: it can be compiled with `fullgraph=True`, once, and nothing in it
        or here waits for the device.

        Gives the new tokens' positions, int64 [B, width]. tree_mask: int64 [B, width] where they are a token tree: bit j of
        [b, i] says that token i sees token j (`token_tree`); then positions are the caller's to give. Run exactly one forward inside, compiled or a replayed CUDA
        graph of it, without `attention_mask`; when it raises, the cache is as before. When the memory for a growing pool
        is missing it is not, and every later use raises RuntimeError until `reset()`.

        A pool of fixed size (`num_blocks`) keeps its tensors until `reset()` (`rewind` to zeros keeps them). A growing one
        replaces them now and then: a compiled forward is compiled again, a captured CUDA graph is not valid any more.

        Raises RuntimeError before the first forward (run the prompt as usual), and when the model's attention does not
        read pages; ValueError when a pool of fixed size is full, with nothing changed.
        """
        state, layers = self.state, self._paged_layers
        state.check_idle()
        if any(layer.eviction is not None for layer in layers):
            raise RuntimeError("decode_step() is not possible with PagedCache(eviction=...): its blocks move")
        if not state.reads_pages:
            raise RuntimeError(
                f"decode_step() needs attn_implementation='flash_paged' and a model whose attention reads pages, not "
                f"{state.attention!r}"
            )
        if not all(layer.is_initialized for layer in layers):
            raise RuntimeError("decode_step() continues a filled cache: run the prompt through the model first")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"width={width!r}: must be a positive integer")
        if any(layer.steps != state.steps for layer in layers):
            raise RuntimeError("decode_step() after a forward that failed halfway: call reset() and begin anew")
        rows = len(state.pool.lengths)
        state.plan_tokens(rows, width, None)
        for layer in layers:
            layer.steps = -1
        for layer in layers:  # what fails here, for want of memory, leaves a cache that only reset() helps
            layer._make_room(layer.state.step)
        for layer in layers:
            layer.steps = state.steps
        try:
            for layer in layers:
                layer.store.make_ready(layer.state.step)
                layer.tables = layer.state.tables_on(layer.device)
            position_ids = layers[0].tables.position_ids(width)
            if position_ids.is_cuda:
                for tensor in (position_ids, *self.static_tensors()):
                    torch._dynamo.mark_static_address(tensor, guard=False)  # or CUDA graphs would copy it
            for each in self.states:
                each.planned = PlannedForward(rows, width, tree_mask)
            yield position_ids
        except BaseException:
            for each in self.states:
                each.planned = each.pending = None
            state.crop(-width)
            self._rewind_stores()
            raise
        for each in self.states:
            each.planned = None
        state.check_consumed()

    @property
    def takes_trees(self) -> bool:
        """Whether `token_tree` and `keep` are possible: not with `eviction`, nor with int4 and int2 pages, whose tokens are
        quantized together."""
        return self.eviction is None and self.kv_format not in ("int4", "int2")

    @contextmanager
    def token_tree(self, seen: torch.Tensor) -> Iterator[None]:
        """For one forward whose new tokens are a tree in every row and not one continuation.

        seen: bool [B, S, S], which of the S new tokens each of them sees, itself included; all of them see what the row
        held before. A node stands behind those that it sees, and its position is that of the row's last token plus their
        number: pass `position_ids`. Attention implementations that do not read pages also need a 4-D mask that says so.
        `keep` afterwards makes one continuation of the tree.

        Raises ValueError when not `takes_trees`.
        """
        if not self.takes_trees:
            raise ValueError(
                f"a token tree needs a PagedCache without eviction whose pages are in the model's dtype, int8 or fp8, not "
                f"kv_format={self.kv_format!r}{', eviction=...' if self.eviction is not None else ''}"
            )
        for state in self.states:
            state.tree = seen
        try:
            yield
        finally:
            for state in self.states:
                state.tree = None

    def keep(self, columns: list[list[int]], width: int) -> None:
        """Of the last `width` tokens of row b, keeps those numbered `columns[b]` (ascending from 0), one behind the other,
        and forgets the rest."""
        self.state.check_idle()
        starts = [length - width for length in self.state.lengths]
        lengths = [start + len(kept) for start, kept in zip(starts, columns)]
        self._check_rewind(lengths)
        moved = [
            (row, kept, place)
            for row, places in enumerate(columns)
            for place, kept in enumerate(places)
            if kept != place
        ]
        if moved:
            for state in self.states:
                slots = [state.pool.slots(row, starts[row], width) for row in range(len(columns))]
                sources, destinations = zip(*((slots[row][kept], slots[row][place]) for row, kept, place in moved))
                for layer in self._paged_layers:
                    if layer.state is state and layer.is_initialized:
                        layer.store.move(sources, destinations)
            if self.row_tokens is not None:
                self.row_tokens.keep(starts, columns)
        self.state.rewind(lengths)
        self._rewind_stores()

    def static_tensors(self) -> list[torch.Tensor]:
        """What a forward under `decode_step` touches; with a pool of fixed size the same tensors until `reset()`."""
        tensors, seen = [], set()
        for layer in self._paged_layers:
            tensors += layer.store.static_tensors()
            if id(layer.tables) not in seen:  # those of other layers too
                seen.add(id(layer.tables))
                tensors += [layer.tables.block_table, layer.tables.cache_seqlens, layer.tables.columns]
        return tensors

    @contextmanager
    def only(self, rows: list[int], batch: int) -> Iterator[None]:
        """For forwards of the prompts of `rows` (different indices, ascending or not) of `batch`, when the prompts of a batch are not
        run all at once: inside, the cache consists of these rows, which must be empty. Afterwards they stand at the left, and
        the next forward needs `position_ids` of its own, as after `rewind`.

        Raises ValueError for a pool that grows, for layers that drop tokens, and for rows that hold tokens or are none.
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
