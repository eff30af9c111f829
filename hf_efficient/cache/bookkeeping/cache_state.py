"""The bookkeeping of a paged cache between forwards."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool
from hf_efficient.cache.bookkeeping.device_tables import DeviceTables
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.integrations.transformers_compat import attention_of
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


class DecodePlan(NamedTuple):
    """What the forward inside `decode_step` must look like, whose bookkeeping is done before it runs.

    width: new tokens of each sequence. tree_mask: int64 [B, width] for a token tree, as the attention kernels take it.
    query_starts: int32 [B + 1] where sequences have different numbers of new tokens, end to end in one row of `width`;
        then `sequences` is 1.
    """

    sequences: int
    width: int
    tree_mask: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None

    def check(self, sequences: int, width: int, mask: torch.Tensor | None) -> None:
        """Raises ValueError when the forward is not the one that was planned."""
        if (sequences, width) != (self.sequences, self.width):
            raise ValueError(
                f"decode_step(width={self.width}) of a PagedCache with {self.sequences} sequences, but the forward has "
                f"{sequences} sequences of {width} columns"
            )
        if mask is not None:
            raise ValueError("decode_step() takes no attention_mask: every new column is a token; leave it out")


REWINDABLE = 64  # tokens that layers with a window keep behind it, so that speculation can take tokens back


class CacheState:
    """The bookkeeping of a group of layers of a `PagedCache`, those that see equally many tokens.

    Args:
        config: of the model's decoder.
        window: tokens, itself included, that a query of these layers sees; None for all. Blocks that lie `REWINDABLE`
            tokens or more behind the window of the next query are freed.

    columns: columns of all [B, S] inputs so far, which transformers calls the sequence length: tokens and, under the
        paged attention, padding. previous_columns: the same before the last forward.
    column_mask: bool [B, columns], which columns are tokens; None for no padding.
    peers: the states of all groups of the cache, this one included, the one that keeps most first. Operations on one of
        them are done on all.
    last_layer: index of the group's last layer.
    over_pages: the attention reads pages though the config says "sdpa".
    num_forwards: forwards planned since `reset`. took_part: in how many of them each layer of the group took part.
    steady: what is the same in every `decode_step` as long as no page and no table changes its place; else None.
    plan: of the last forward. pending: the `PageHandle` of the last `update`, until the attention has used it.
    decode_plan: inside `decode_step` what the forward must look like.
    tree: bool [B, S, S] for a forward over a token tree, as in `ForwardPlan`.
    tables: the block tables by device and number of sequences.
    """

    def __init__(self, config, block_size: int, num_blocks: int | None, window: int | None = None):
        self.config = config
        self.window = window
        self.peers = [self]
        self.last_layer: int | None = None
        self.over_pages = False
        self.took_part: list[int] = []
        self.pool = BlockPool(block_size, num_blocks)
        # attention over compressed latents expands them after `update`, so it cannot read pages
        self.has_latents = getattr(config, "kv_lora_rank", None) is not None
        self.reset()

    def reset(self) -> None:
        """Forgets all tokens of this group alone."""
        self.pool.reset()
        self.columns = self.previous_columns = 0
        self.column_mask: torch.Tensor | None = None
        self.num_forwards = 0
        self.plan: ForwardPlan | None = None
        self.pending = None
        self.decode_plan: DecodePlan | None = None
        self.tree: torch.Tensor | None = None
        self.steady: tuple | None = None
        self.tables: dict[tuple[torch.device, int], DeviceTables] = {}

    def restore(self, snapshot: dict, column_mask: torch.Tensor | None) -> None:
        """Makes this the state that was saved. snapshot: of the pool, with `columns`. Raises ValueError where its parts
        do not belong together."""
        columns = snapshot["columns"]
        self.steady = None
        self.pool.restore(snapshot)
        sequences, tokens = len(self.lengths), self.lengths
        if column_mask is None:
            fits = columns == max(tokens)
        else:
            fits = column_mask.dtype == torch.bool and column_mask.shape == (sequences, columns)
            fits = fits and column_mask.sum(1).tolist() == tokens
        if self.window is None and any(self.pool.dropped):
            raise ValueError("layers that see all tokens have dropped some")
        if not fits:
            raise ValueError(f"{columns} columns and their mask do not fit sequences of {tokens} tokens")
        self.columns = self.previous_columns = columns
        self.column_mask = column_mask

    @property
    def reads_pages(self) -> bool:
        return self.attention in ATTENTION_NAMES and not self.has_latents

    @property
    def attention(self) -> str:
        """The attention implementation of the forwards over this cache."""
        return ATTENTION_NAMES[0] if self.over_pages else attention_of(self.config)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, dropped ones included."""
        return self.pool.lengths if self.window is None else self.pool.total_lengths

    @property
    def is_ragged(self) -> bool:
        lengths = self.lengths
        return bool(lengths) and min(lengths) != max(lengths)

    def see(self, window_size: tuple[int, int]) -> None:
        """Notes that a layer attends to `window_size[0]` tokens before each query (-1: to all).

        A layer that sees further than the config says ends the dropping of tokens. Raises RuntimeError when some that
        it would see are dropped already.
        """
        if self.window is None or 0 <= window_size[0] < self.window:
            return
        if any(self.pool.dropped):
            raise RuntimeError(
                f"PagedCache dropped tokens that lie more than {self.window} before the end, as the config says that "
                f"these layers see no others, and one of them now attends with window_size={window_size}"
            )
        self.window = None
        self.peers.remove(self)
        self.peers.insert(0, self)

    def check_consumed(self) -> None:
        """Raises RuntimeError when the keys and values of the last `update` never reached the paged attention."""
        for state in self.peers:
            if state.pending is None:
                continue
            layer = state.pending.layer.layer_idx
            state.pending = None
            raise RuntimeError(
                f"PagedCache under attn_implementation={self.attention!r}: the keys that update() gave "
                f"to layer {layer} never reached that attention function (the model changed them, or ran another "
                "attention function), so they were not stored. Call reset() on this cache and use "
                'model.set_attn_implementation("sdpa") with it.'
            )

    def check_idle(self) -> None:
        """Raises RuntimeError when a forward is planned that has not run, or keys of the last one were lost."""
        if self.decode_plan is not None:
            raise RuntimeError("PagedCache: only the forward itself may use the cache inside decode_step()")
        self.check_consumed()

    def check_batch(self, batch: int) -> None:
        if self.pool.lengths and len(self.pool.lengths) != batch:
            raise ValueError(
                f"PagedCache holds {len(self.pool.lengths)} sequences and cannot take a batch of {batch}: call "
                "reset(), batch_repeat_interleave() or batch_select_indices() first."
            )

    def check_mask(self, mask: torch.Tensor) -> None:
        """Raises ValueError where a mask [B, >= columns], 0 at padding, contradicts what the paged attention stored."""
        if not self.columns:
            return
        seen, stored = mask[:, : self.columns].bool().cpu(), self.column_mask
        if stored is None:  # sequences of unequal length stand at the right
            lengths = torch.tensor(self.lengths)
            stored = torch.arange(self.columns) >= self.columns - lengths[:, None]
        if not torch.equal(seen, stored):
            raise ValueError(
                "attention_mask contradicts the cache: of the columns that PagedCache has seen it marks "
                f"{seen.sum(1).tolist()} as tokens, at other places or in other number than the "
                f"{self.lengths} that are stored. A token cannot be hidden later: use rewind() or crop(), or "
                'attn_implementation="sdpa".'
            )

    def plan_columns(self, batch: int, width: int) -> ForwardPlan:
        """Plans a forward under an attention that reads no pages: every column is stored, padding too."""
        if self.column_mask is not None and not bool(self.column_mask.all()):
            raise RuntimeError(
                "PagedCache was filled by the paged attention, which stores no padding, and cannot be continued by "
                f"attn_implementation={self.attention!r}, which expects it. Call reset() first, or "
                "keep the implementation."
            )
        if any(len(set(state.pool.dropped)) > 1 for state in self.peers):
            raise RuntimeError(
                "PagedCache: under the paged attention sequences of unequal length dropped unequal numbers of tokens "
                f"behind the window of some layers, and cannot be continued by attn_implementation={self.attention!r}. "
                "Call reset() first, or keep the implementation."
            )
        self.check_batch(batch)
        return self._append([width] * batch, None, width, None, evenly=True)

    def plan_tokens(self, batch: int, width: int, mask: torch.Tensor | None) -> ForwardPlan:
        """Plans a forward of the paged attention. mask: bool or int [B, columns + width], 0 is padding; or None.

        Raises ValueError when the mask contradicts what the cache holds. Of a mask on an accelerator that adds one
        column to a filled cache only the shape is checked: reading it would wait for the device at every token.
        """
        if mask is not None and (mask.dim() != 2 or tuple(mask.shape) != (batch, self.columns + width)):
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)}: the paged attention takes a 2-D mask of shape "
                f"{(batch, self.columns + width)} (batch, columns in the cache + new ones), or None. For other masks "
                'use attn_implementation="sdpa".'
            )
        if mask is None or (mask.device.type != "cpu" and self.columns and width == 1):
            self.check_batch(batch)
            column_mask = self.column_mask
            if column_mask is not None:
                column_mask = torch.nn.functional.pad(column_mask, (0, width), value=True)
            return self._append([width] * batch, None, width, column_mask)
        mask = mask.bool().cpu()
        self.check_mask(mask)
        self.check_batch(batch)
        valid = mask[:, self.columns :]
        counts = valid.sum(1).tolist()
        if min(counts) == width:
            valid = None
        return self._append(counts, valid, width, mask)

    def plan_packed(self, counts: list[int]) -> ForwardPlan:
        """Plans a forward of the paged attention in which sequence b has `counts[b]` new tokens and no padding."""
        self.check_batch(len(counts))
        plan = self._append(counts, None, max(counts), None)
        for state in self.peers:
            state.columns = max(state.lengths)
        return plan

    def _append(self, counts, valid, width, column_mask, evenly=False) -> ForwardPlan:
        is_new = not self.pool.lengths
        if is_new:
            for state in self.peers:
                state.pool.add_sequences(len(counts))
        try:
            for state in self.peers:  # the first needs most blocks, so it is the one that raises, with nothing changed
                state._append_own(counts, valid, width, column_mask, evenly)
        except ValueError:
            if is_new:
                for state in self.peers:
                    state.pool.reset()
            raise
        return self.plan

    def _append_own(self, counts, valid, width, column_mask, evenly) -> None:
        change = self.pool.append(counts)
        dropped = self._drop(counts, evenly)
        starts = [length - count for length, count in zip(self.pool.lengths, counts)]
        self.column_mask = column_mask
        self.previous_columns = self.columns
        self.columns += width
        self.num_forwards += 1
        self.steady = None
        self.plan = ForwardPlan(self.pool, change, starts, valid, width, dropped, self.tree)
        changes = self.pool.table_changes()
        for (device, sequences), tables in self.tables.items():
            if sequences != len(starts):  # of another batch size: `table_changes` reports all blocks after it changed
                continue
            if tables.fits(self.pool):
                tables.update(changes, starts, self.previous_columns, self.pool.dropped)
            else:
                self.tables[device, sequences] = DeviceTables(self.pool, starts, self.previous_columns, device)

    def _drop(self, counts: list[int], evenly: bool) -> list[int] | None:
        """Drops the tokens that no query sees any more, equally many of each sequence when `evenly`. Returns how many
        of each, None for nothing."""
        if self.window is None:
            return None
        size, kept = self.pool.block_size, self.window - 1 + REWINDABLE
        tokens = [max(0, n - c - kept) // size * size for n, c in zip(self.pool.lengths, counts)]
        tokens = [min(tokens)] * len(tokens) if evenly else tokens
        if not any(tokens):
            return None
        self.pool.drop(tokens)
        return tokens

    def tables_on(self, device) -> DeviceTables:
        """The tables of the current forward."""
        key = device, len(self.pool.tables)
        if key not in self.tables:
            self.tables[key] = DeviceTables(self.pool, self.plan.starts, self.previous_columns, device)
        return self.tables[key]

    @contextmanager
    def only(self, sequences: list[int], batch: int) -> Iterator[None]:
        """Inside, the cache, a batch of `batch`, consists of the empty sequences `sequences` alone."""
        if not self.pool.lengths:
            for state in self.peers:
                state.pool.add_sequences(batch)
        with ExitStack() as pools:
            for state in self.peers:
                pools.enter_context(state.pool.only(sequences))
                state.columns, state.column_mask = 0, None
            try:
                yield
            finally:
                pools.close()
                for state in self.peers:
                    state.columns, state.column_mask = max(state.lengths), None

    def rewind(self, lengths: list[int]) -> None:
        held = self.lengths
        if len(lengths) != len(held) or any(not 0 <= new <= now for new, now in zip(lengths, held)):
            raise ValueError(
                f"rewind(lengths={lengths}): needs one length per sequence, each from 0 to the sequence's {held}"
            )
        self._shorten(lengths, max(lengths, default=0), None)

    def _shorten(self, lengths: list[int], columns: int, column_mask: torch.Tensor | None) -> None:
        for state in self.peers:
            for sequence, (length, dropped) in enumerate(zip(lengths, state.pool.dropped)):
                if dropped and 0 < length < dropped + state.window - 1:
                    raise ValueError(
                        f"PagedCache cannot go back to {length} tokens in sequence {sequence}: the layers that see "
                        f"{state.window} tokens have dropped its first {dropped}, so it can go back to "
                        f"{dropped + state.window - 1} or to 0. Up to {REWINDABLE} tokens can always be taken back; "
                        "for more, run the text again."
                    )
        for state in self.peers:
            state.pool.rewind(lengths)
            state.columns, state.column_mask = columns, column_mask

    def cropped(self, tokens_to_remove: int) -> tuple[int, list[int]]:
        """Columns and lengths after `crop`."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of columns to remove as a negative number, as transformers "
                "does since version 5"
            )
        removed = min(-tokens_to_remove, self.columns)
        kept = self.columns - removed
        if self.column_mask is None:
            return kept, [max(length - removed, 0) for length in self.lengths]
        tokens = self.column_mask[:, kept:].sum(1).tolist()
        return kept, [length - count for length, count in zip(self.lengths, tokens)]

    def crop(self, tokens_to_remove: int) -> None:
        kept, lengths = self.cropped(tokens_to_remove)
        self._shorten(lengths, kept, None if self.column_mask is None else self.column_mask[:, :kept])

    def select(self, sequences: torch.Tensor) -> None:
        """Sequence i becomes what sequence `sequences[i]` was (int64 [new batch])."""
        mask = None if self.column_mask is None else self.column_mask[sequences]
        for state in self.peers:
            state.pool.fork(sequences.tolist())
            state.column_mask = mask
            if mask is None:  # no column belongs to padding alone
                state.columns = max(state.lengths, default=0)
