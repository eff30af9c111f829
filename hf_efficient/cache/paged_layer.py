"""A layer of a `PagedCache`: what transformers and the attention call, and the pages behind it."""

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.bookkeeping.device_tables import DeviceTables, to_device
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.eviction.base import EvictionPolicy
from hf_efficient.cache.eviction.rotary import Rotary
from hf_efficient.cache.memory_budget import MemoryBudget
from hf_efficient.cache.offload import CacheTiers
from hf_efficient.cache.page_handle import PAGES, PageHandle
from hf_efficient.cache.stores.contiguous import contiguous
from hf_efficient.cache.stores.evicting import EvictingStore
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.cache.stores.kv_formats import check_form, make_store


class PagedLayer(CacheLayerMixin):
    """What transformers calls a layer of a cache: hands keys and values to the layer's `PageStore`."""

    is_compileable = False
    is_croppable = True
    budget: MemoryBudget | None = None
    tiers: CacheTiers | None = None
    exact = True  # see `PageStore`

    def __init__(
        self,
        state: CacheState,
        layer_idx: int,
        eviction: tuple[EvictionPolicy, Rotary | None] | None = None,
        kv_format: str = "auto",
        has_window: bool = False,
    ):
        super().__init__()
        self.state = state
        self.layer_idx = layer_idx
        self.eviction = eviction
        self.kv_format = kv_format
        self.has_window = has_window
        self.forget()

    @property
    def is_sliding(self) -> bool:
        return self.state.window is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all keys (see `contiguous`), made at every access; None before the first forward."""
        return contiguous(self)[0] if self.is_initialized and self.state.pool.lengths else None

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return contiguous(self)[1] if self.is_initialized and self.state.pool.lengths else None

    @keys.setter
    def keys(self, value) -> None:
        self._refuse_assignment(value)

    @values.setter
    def values(self, value) -> None:
        self._refuse_assignment(value)

    @staticmethod
    def _refuse_assignment(value) -> None:
        if value is not None:  # transformers' base class sets None
            raise AttributeError("PagedCache: keys and values lie in pages; use update() and rewind()")

    def forget(self) -> None:
        """Drops the tensors."""
        self.store: PageStore | None = None
        self.tables: DeviceTables | None = None  # of a planned forward, on this layer's device
        self.steps = 0  # how many of the cache's steps this layer took part in, -1 when it failed in one
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.budget is not None:
            self.budget.fix_pools(self.make_store, key_states, value_states)
        self.store = self.make_store(self.state.pool.capacity, key_states, value_states)
        if self.budget is not None:
            self.budget.check(self.store, self.layer_idx)
        if self.tiers is not None:
            self.store = self.tiers.adopt(self.store, self.state)
        self.is_initialized = True

    def make_store(self, capacity: int, key: torch.Tensor, value: torch.Tensor) -> PageStore:
        """Empty pages of `capacity` blocks for keys and values like these [B, H, S, D]."""
        if self.eviction is not None:
            return EvictingStore(*self.eviction, self.kv_format, self.state.pool.block_size, key, value)
        store = make_store(self.kv_format, self.state.pool, capacity, key, value, self.has_window)
        store.exact = self.exact
        return store

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Takes the new keys [B, Hk, S, D] and values [B, Hv, S, Dv] of one forward.

        Under the paged attention nothing is stored yet: they come back marked, and the attention function stores them.
        Under any other, returns contiguous keys and values of all tokens: [B, H, longest row, D], each row at the left
        and zeros after it. Layers with a window give the last `window - 1 + S` tokens, as transformers' own do, and zeros for
        what is dropped while rows are ragged.
        """
        state = self.state
        state.check_consumed()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "PagedCache keeps no gradients: wrap the forward in torch.no_grad(), or train without a cache "
                "(use_cache=False)."
            )
        check_form(self.kv_format, key_states, value_states)
        if self.budget is not None:
            self.budget.fix_pools(self.make_store, key_states, value_states)
        if self.eviction is not None and not state.reads_pages:
            raise ValueError(
                'PagedCache(eviction=...) needs attn_implementation="flash_paged", whose attention reads the tokens that '
                f"are left, not {state.attention!r}"
            )
        if state.reads_pages:
            if state.planned is None and (
                torch.compiler.is_compiling() or (key_states.is_cuda and torch.cuda.is_current_stream_capturing())
            ):
                raise RuntimeError(
                    "PagedCache: a forward that is compiled or captured in a CUDA graph must run under "
                    "`with cache.decode_step():`, which does its bookkeeping outside"
                )
            handle = state.pending = PageHandle(self)
            setattr(key_states, PAGES, handle)
            return key_states, value_states
        step = self.join_step(key_states.shape[0], key_states.shape[2])
        self.prepare(step, key_states, value_states)
        keys, values = self.store.update(step, key_states, value_states)
        if not state.is_ragged:
            if state.window is not None:
                visible = slice(-(state.window - 1 + step.width), None)
                keys, values = keys[:, :, visible], values[:, :, visible]
        else:
            lengths = to_device(step.lengths, torch.int64, keys.device)
            beyond = (torch.arange(step.max_length, device=keys.device) >= lengths[:, None])[:, None, :, None]
            keys, values = keys.masked_fill(beyond, 0), values.masked_fill(beyond, 0)
            if any(dropped := state.pool.dropped):
                keys, values = (torch.nn.functional.pad(x, (0, 0, dropped[0], 0)) for x in (keys, values))
        return keys.contiguous(), values.contiguous()

    def join_step(self, batch: int, width: int, mask: torch.Tensor | None = None) -> ForwardPlan:
        """The plan of the current forward, made by the first layer that asks."""
        state = self.state
        if self.steps == state.steps:
            step = state.plan_tokens(batch, width, mask) if state.reads_pages else state.plan_columns(batch, width)
        else:
            step = state.step
            if self.steps != state.steps - 1 or (len(step.starts), step.width) != (batch, width):
                raise RuntimeError(
                    f"PagedCache: layer {self.layer_idx} took part in {self.steps} forwards with this cache and another "
                    f"layer in {state.steps} (now {batch} rows of {width} columns, there {len(step.starts)} of "
                    f"{step.width}). All layers must take part in every forward: call reset() after a forward that "
                    "failed halfway, and use DynamicCache for early exit."
                )
        return step

    def prepare(self, step: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Makes the blocks of this step exist, moves and copies those that must be."""
        self.steps = -1  # until that is done
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        elif (given := PageStore.form_of(key, value)) != self.store.form:
            raise ValueError(
                f"PagedCache: layer {self.layer_idx} stores (dtype, key heads, head dim, value heads, head dim) "
                f"{self.store.form} and was given {given}: call reset() before using it with another model or dtype."
            )
        self._make_room(step)
        self.steps = self.state.steps

    def _make_room(self, step: ForwardPlan) -> None:
        self.store.make_room(*step.change)
        if step.dropped is not None:
            self.store.drop(step.dropped)

    def get_seq_length(self) -> int | torch.Tensor:
        """Columns seen: tokens and, under the paged attention, padding. In a planned forward an int64 [] tensor, which a
        compiled graph reads anew every time."""
        state = self.state
        if (
            not self.is_initialized
        ):  # also one that the model passes over, which has seen nothing in transformers' caches
            return 0
        if state.planned is not None:
            return self.tables.columns
        return state.previous_columns if self.steps == state.steps - 1 else state.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.state.planned is not None:  # a number that stays the same, and that no mask has
            return self.tables.block_table.shape[1] * self.state.pool.block_size + query_length, 0
        columns, window = self.get_seq_length(), self.state.window
        if window is None or self.state.reads_pages or self.state.is_ragged:
            return columns + query_length, 0
        return min(columns, window - 1) + query_length, max(columns - window + 1, 0)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise RuntimeError("the layers of a PagedCache share their blocks: call reset() on the cache")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise RuntimeError("the layers of a PagedCache share their blocks: call reorder_cache() on the cache")
