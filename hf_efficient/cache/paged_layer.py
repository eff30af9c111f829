"""A layer of a `PagedCache`: what transformers and the attention call, and the pages behind it."""

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.bookkeeping.device_tables import DeviceTables
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.page_handle import PAGES, PageHandle
from hf_efficient.cache.stores.contiguous import contiguous, visible
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.cache.stores.kv_formats import check_form


class PagedLayer(CacheLayerMixin):
    """What transformers calls a layer of a cache: hands keys and values to the layer's `PageStore`.

    state: the bookkeeping, shared by the layers that see equally many tokens. evicts: the layer keeps only what the
    cache's `EvictionPolicy` chooses. has_window: its attention sees only tokens near the query. exact: see `PageStore`.
    """

    is_compileable = False
    is_croppable = True
    stores = None  # the `StoreFactory` of the cache, set when all layers are made

    def __init__(self, state: CacheState, layer_idx: int, evicts: bool, has_window: bool, exact: bool):
        super().__init__()
        self.state, self.layer_idx = state, layer_idx
        self.evicts, self.has_window, self.exact = evicts, has_window, exact
        self._place = len(state.took_part)
        state.took_part.append(0)
        self.forget()

    @property
    def is_sliding(self) -> bool:
        return self.state.window is not None

    @property
    def num_forwards(self) -> int:
        """Forwards that this layer took part in, -1 when it failed in one."""
        return self.state.took_part[self._place]

    @num_forwards.setter
    def num_forwards(self, count: int) -> None:
        self.state.took_part[self._place] = count

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
        self.tables: DeviceTables | None = None  # of a decode step, on this layer's device
        self.num_forwards = 0
        self.is_initialized = False

    def make_store(self, capacity: int, key: torch.Tensor, value: torch.Tensor) -> PageStore:
        """Empty pages of `capacity` blocks for keys and values like these [B, H, S, D]."""
        return self.stores.make_empty(self, capacity, key, value)

    def fix_pools(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Sizes the pools of a cache with a memory budget for keys and values like these [B, H, S, D]."""
        self.stores.fix_pools(self, key, value)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = self.stores.make(self, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Takes the new keys [B, Hk, S, D] and values [B, Hv, S, Dv] of one forward.

        Under the paged attention nothing is stored yet: they come back marked, and the attention function stores them.
        Under any other, returns contiguous keys and values of all tokens: [B, H, longest sequence, D], each sequence at
        the left and zeros after it. Layers with a window give the last `window - 1 + S` tokens, as transformers' own
        do, and zeros for what is dropped while sequences are of unequal length.
        """
        state = self.state
        state.check_consumed()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "PagedCache keeps no gradients: wrap the forward in torch.no_grad(), or train without a cache "
                "(use_cache=False)."
            )
        check_form(self.stores.kv_format, key_states, value_states)
        if self.stores.budget is not None:
            self.fix_pools(key_states, value_states)
        if self.evicts and not state.reads_pages:
            raise ValueError(
                'PagedCache(eviction=...) needs attn_implementation="flash_paged", whose attention reads the tokens '
                f"that are left, not {state.attention!r}"
            )
        if state.reads_pages:
            if state.decode_plan is None and (
                torch.compiler.is_compiling() or (key_states.is_cuda and torch.cuda.is_current_stream_capturing())
            ):
                raise RuntimeError(
                    "PagedCache: a forward that is compiled or captured in a CUDA graph must run under "
                    "`with cache.decode_step():`, which does its bookkeeping outside"
                )
            handle = state.pending = PageHandle(self)
            setattr(key_states, PAGES, handle)
            return key_states, value_states
        plan = self.join_plan(key_states.shape[0], key_states.shape[2])
        self.prepare(plan, key_states, value_states)
        return visible(state, plan, *self.store.update(plan, key_states, value_states))

    def join_plan(self, batch: int, width: int, mask: torch.Tensor | None = None) -> ForwardPlan:
        """The plan of the current forward, made by the first layer that asks."""
        state = self.state
        if self.num_forwards == state.num_forwards:
            return state.plan_tokens(batch, width, mask) if state.reads_pages else state.plan_columns(batch, width)
        plan = state.plan
        if self.num_forwards != state.num_forwards - 1 or (len(plan.starts), plan.width) != (batch, width):
            raise RuntimeError(
                f"PagedCache: layer {self.layer_idx} took part in {self.num_forwards} forwards with this cache and "
                f"another layer in {state.num_forwards} (now {batch} sequences of {width} columns, there "
                f"{len(plan.starts)} of {plan.width}). All layers must take part in every forward: call reset() after "
                "a forward that failed halfway, and use DynamicCache for early exit."
            )
        return plan

    def prepare(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Makes the blocks that `plan` needs exist, moves and copies those that must be."""
        self.num_forwards = -1  # until that is done
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        elif (given := PageStore.form_of(key, value)) != self.store.form:
            raise ValueError(
                f"PagedCache: layer {self.layer_idx} stores (dtype, key heads, head dim, value heads, head dim) "
                f"{self.store.form} and was given {given}: call reset() before using it with another model or dtype."
            )
        self.make_room(plan)
        self.num_forwards = self.state.num_forwards

    def make_room(self, plan: ForwardPlan) -> None:
        """Does to the pages what `plan` changes in the pool."""
        self.store.make_room(*plan.change)
        if plan.dropped is not None:
            self.store.drop(plan.dropped)

    def get_seq_length(self) -> int | torch.Tensor:
        """Columns seen: tokens and, under the paged attention, padding. In a decode step an int64 [] tensor, which a
        compiled graph reads anew every time."""
        state = self.state
        # also a layer that the model passes over, which sees nothing in transformers' caches
        if not self.is_initialized:
            return 0
        if state.decode_plan is not None:
            return self.tables.columns
        return state.previous_columns if self.num_forwards == state.num_forwards - 1 else state.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.state.decode_plan is not None:  # a constant that no mask has, so that nothing is compiled again
            return self.tables.block_table.shape[1] * self.state.pool.block_size + query_length, 0
        state = self.state
        if state.is_ragged and state.column_mask is None and not state.reads_pages:
            raise ValueError(
                f"PagedCache holds sequences of {state.lengths} tokens: under attn_implementation={state.attention!r} "
                "a forward over them needs a 4-D attention_mask, as the model's own one is for sequences of one length"
            )
        columns, window = self.get_seq_length(), state.window
        if window is None or state.reads_pages:
            return columns + query_length, 0
        return min(columns, window - 1) + query_length, max(columns - window + 1, 0)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise RuntimeError("the layers of a PagedCache share their blocks: call reset() on the cache")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise RuntimeError("the layers of a PagedCache share their blocks: call reorder_cache() on the cache")
