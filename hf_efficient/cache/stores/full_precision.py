"""The pages of one layer in the model's dtype: what writes and reads them, and the attention over them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_efficient.cache.bookkeeping.device_tables import DeviceTables
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.bookkeeping.tensors import lazy_zeros, to_device
from hf_efficient.kernels.attention import api, native_cpu, policy, ragged, torch_cpu


class Form(NamedTuple):
    """What all keys and values of a store agree in."""

    dtype: torch.dtype
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int


class PageStore:
    """Pages in the model's dtype. The other formats are subclasses.

    pages: name -> tensor [num_blocks, ...], all that a block holds, so that blocks are copied, moved, saved and
        offloaded without knowing the format. Here "keys" [num_blocks, block_size, Hk, D] and "values" [num_blocks,
        block_size, Hk, Dv]. On a CPU they take memory for the blocks that were written (`lazy_zeros`).
    rows: name -> tensor [B, ...], what is kept by sequence and not by block, saved and loaded as it is. Here nothing.
    lag: tokens before the new ones whose pages a forward may still change.
    takes_steps: every `decode_step` needs `make_ready`, and `make_room` also where the pool does not change.
    exact: the attention on a CPU has the bits of SDPA over a `DynamicCache`, where that costs little. Else it reads the
        pages where they lie, at least twice as fast.
    """

    lag = 0
    exact = True
    takes_steps = False

    def __init__(self, capacity: int, block_size: int, key: torch.Tensor, value: torch.Tensor):
        """key [B, Hk, S, D], value [B, Hk, S, Dv]: of the shapes, dtype and device that will be stored."""
        self.dtype, self.device, self.form = key.dtype, key.device, self.form_of(key, value)
        self.rows: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):  # inference tensors cannot be written to outside of inference mode
            self.pages = self._make_pages(capacity, block_size, key, value)

    def _make_pages(self, capacity, block_size, key, value) -> dict[str, torch.Tensor]:
        return {
            name: lazy_zeros(new, capacity, block_size, new.shape[1], new.shape[3])
            for name, new in (("keys", key), ("values", value))
        }

    @staticmethod
    def form_of(key: torch.Tensor, value: torch.Tensor) -> Form:
        return Form(key.dtype, key.shape[1], key.shape[3], value.shape[1], value.shape[3])

    @property
    def capacity(self) -> int:
        return next(iter(self.pages.values())).shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.nbytes for pages in self.pages.values())

    def static_tensors(self) -> list[torch.Tensor]:
        """The tensors that stay where they are while a pool of fixed size is in use."""
        return [*self.pages.values(), *self.rows.values()]

    def make_room(self, capacity: int, moves: list[tuple[int, int, int]] | None, copies: list[tuple[int, int]]) -> None:
        """Does what a `StorageChange` says."""
        if moves is not None or capacity > self.capacity:
            self.pages = {name: _moved(pages, capacity, moves) for name, pages in self.pages.items()}
        if copies:
            source, destination = to_device(copies, torch.int64, self.device).T
            for pages in self.pages.values():
                pages[destination] = pages[source]

    def drop_pages(self) -> None:
        """Frees the pages, which somebody else has copied."""
        self.pages = None

    def make_ready(self, plan: ForwardPlan) -> None:
        """Prepares for an op that appends the tokens of `plan`, whose blocks exist."""

    def restored(self) -> None:
        """Called when `rows` were read from a file."""

    def settled(self, lengths: list[int]) -> list[int]:
        """How many tokens, from the beginning of each sequence of `lengths`, lie in blocks that will not change."""
        return lengths

    def beginning(self, b: int) -> dict[str, torch.Tensor]:
        """What the store keeps of the first block of sequence b outside the blocks: nothing here."""
        return {}

    def resume(self, lengths: list[int], beginnings: list[dict[str, torch.Tensor] | None]) -> None:
        """The blocks of sequence b now hold `lengths[b]` tokens of another sequence, whose `beginning` was
        `beginnings[b]`; None for a sequence that stays as it is."""

    def select(self, indices: list[int]) -> None:
        """Sequence i becomes what sequence `indices[i]` was: for what is kept by sequence."""

    def rewind(self, lengths: list[int]) -> None:
        """Sequence b has `lengths[b]` tokens from now on, no more than before: for what is kept by sequence."""

    def check_rewind(self, lengths: list[int]) -> None:
        """Raises ValueError where `rewind(lengths)` is not possible."""

    def drop(self, tokens: list[int]) -> None:
        """Sequence b has lost its first `tokens[b]` tokens, whole blocks, and counts from 0 again: for what is kept by
        sequence."""

    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copies tokens from the slots `sources` to `destinations`."""
        self.take(self, *to_device([sources, destinations], torch.int64, self.device))

    def take(self, other: "PageStore", sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies tokens from slots of `other`, of the same form, to slots of this store (int64 [n])."""
        for name, pages in self.pages.items():
            flat = other.pages[name].flatten(0, 1)
            pages.flatten(0, 1).index_copy_(0, destinations, flat.index_select(0, sources))

    def update(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `key` [B, Hk, S, D] and `value`, and reads all."""
        self.write(plan, key, value)
        return self.read(plan)

    def write(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores `key` [B, Hk, S, D] and `value` in the slots of `plan`; padding is skipped."""
        for pages, new in ((self.pages["keys"], key), (self.pages["values"], value)):
            if plan.is_even and plan.contiguous_span is not None:
                offset, room = plan.contiguous_span
                heads, dim = pages.shape[2:]
                strides = (room * heads * dim, dim, heads * dim, 1)
                pages.as_strided(new.shape, strides, (offset + plan.starts[0]) * heads * dim).copy_(new)
            else:
                pages.flatten(0, 1).index_copy_(0, plan.slot_mapping(new.device), plan.tokens_of(new))

    def put(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores `key` [n, Hk, D] and `value` [n, Hk, Dv] in `slots` int64 [n]."""
        for pages, new in ((self.pages["keys"], key), (self.pages["values"], value)):
            pages.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, Hk, longest sequence, D] and values of all sequences.

        A view where the sequences lie evenly, else gathered. Behind the end of a sequence stand meaningless finite
        numbers.
        """
        result = []
        for pages in (self.pages["keys"], self.pages["values"]):
            heads, dim = pages.shape[2:]
            if plan.contiguous_span is not None:
                offset, room = plan.contiguous_span
                size = (len(plan.lengths), heads, plan.max_length, dim)
                result.append(pages.as_strided(size, (room * heads * dim, dim, heads * dim, 1), offset * heads * dim))
            else:
                table = plan.block_table(pages.device)
                gathered = pages.index_select(0, table.flatten()).view(table.shape[0], -1, heads, dim)
                result.append(gathered[:, : plan.max_length].transpose(1, 2))
        return result[0], result[1]

    def attend(self, plan: ForwardPlan, tables_on: Callable, query, key, value, **options) -> torch.Tensor:
        """Stores `key`, `value` [B, Hk, S, D] and attends `query` [B, Hq, S, D] over all tokens of each sequence.

        key: None where they are stored already. tables_on: device -> `DeviceTables`. options: those of
        `api.flash_attn_with_kvcache`. Returns [B, S, Hq, Dv]; zeros at padding.
        """
        attend = self._attend_cpu if query.device.type == "cpu" else self._attend_kernels
        return attend(plan, tables_on, query, key, value, **options)

    def _attend_cpu(self, plan, tables_on, query, key, value, *, causal, window_size, **options):
        if plan.valid is None and self._reads_pages(plan, query):
            options |= dict(causal=causal, window_size=window_size, tree_mask=plan.tree_mask(query.device))
            return self.append_and_attend(tables_on(query.device), query, key, value, **options)
        if key is not None:
            self.write(plan, key, value)
        keys, values = self.read(plan)
        mask = plan.attention_mask(causal, window_size, query.device)
        return torch_cpu.attend(
            query, keys, values, mask=mask, causal=causal and mask is None and plan.width > 1, **options
        )

    def _reads_pages(self, plan: ForwardPlan, query: torch.Tensor) -> bool:
        """Whether a CPU reads the pages in place, which gives other bits than SDPA."""
        if not self.exact and native_cpu.serves(query.transpose(1, 2), **self._cache(None)):
            return True
        if plan.contiguous_span is not None:
            return False
        return policy.reads_in_place(plan.width, len(plan.lengths) * plan.max_length * self.pages["keys"][0, 0].numel())

    def _attend_kernels(self, plan, tables_on, query, key, value, **options):
        device = query.device
        tables, tokens = tables_on(device), plan.token_indices(device)
        if plan.tree is not None or (tokens is None and plan.width <= policy.MAX_DECODE_QUERIES):
            options["tree_mask"] = plan.tree_mask(device)
            return self.append_and_attend(tables, query, key, value, **options)
        query = query.transpose(1, 2)  # [B, S, Hq, D]
        keys, values, table = self.pages["keys"], self.pages["values"], tables.block_table
        if key is not None:
            flat_key, flat_value = plan.tokens_of(key), plan.tokens_of(value)
            api.reshape_and_cache(flat_key, flat_value, keys, values, slot_mapping=plan.slot_mapping(device))
            if not any(plan.starts):  # nothing but the new tokens to see
                keys, values, table = flat_key, flat_value, None
        flat_query = query.flatten(0, 1) if tokens is None else query.flatten(0, 1)[tokens]
        output = api.flash_attn_varlen_func(
            flat_query, keys, values, plan.cu_seqlens(device, new=True), plan.cu_seqlens(device, new=False),
            plan.max_new, plan.max_length, block_table=table, **options,
        )  # fmt: skip
        return plan.padded(output, query.shape[0], query.shape[1])

    def append_and_attend(self, tables: DeviceTables, query, key, value, **options) -> torch.Tensor:
        """`attend` in one op, for forwards in which every new column is a token: touches nothing but
        tensors, so it can be compiled."""
        seqlens = tables.cache_seqlens
        if key is None:
            value, seqlens = None, seqlens + query.shape[2]
        else:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        return api.flash_attn_with_kvcache(
            query.transpose(1, 2), k=key, v=value, cache_seqlens=seqlens, **self._cache(tables.block_table), **options
        )  # fmt: skip

    def append_and_attend_packed(
        self, tables: DeviceTables, query_starts, query, key, value, *, causal, window_size, tree_mask=None, **options
    ) -> torch.Tensor:
        """`append_and_attend` for sequences with different numbers of new tokens, end to end in query [1, Hq, T, D],
        key and value. query_starts: int32 [B + 1].

        Raises ValueError for attention that is not causal.
        """
        if not causal:
            raise ValueError("a forward of sequences end to end is causal")
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        cache, tree = self._cache(tables.block_table), None if tree_mask is None else tree_mask[0]
        return ragged.attend_ragged(
            query, key, value, query_starts=query_starts, cache_seqlens=tables.cache_seqlens, left=window_size[0],
            tree_mask=tree, **cache, **options,
        )[None]  # fmt: skip

    def _cache(self, block_table: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments by which the attention ops are told what is stored."""
        return dict(k_cache=self.pages["keys"], v_cache=self.pages["values"], block_table=block_table)


def _moved(pages: torch.Tensor, capacity: int, moves: list[tuple[int, int, int]] | None) -> torch.Tensor:
    """`pages` with `capacity` blocks, the used ones moved; the same tensor where it has that size already."""
    moves = [(0, 0, pages.shape[0])] if moves is None else moves
    if capacity == pages.shape[0]:
        pieces = [pages[old : old + number].clone() for old, _, number in moves]
    else:
        pieces = [pages[old : old + number] for old, _, number in moves]
        with torch.inference_mode(False):
            pages = lazy_zeros(pages, capacity, *pages.shape[1:])
    for (_, new, number), piece in zip(moves, pieces):
        pages[new : new + number] = piece
    return pages
