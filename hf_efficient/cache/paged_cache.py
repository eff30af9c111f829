"""`PagedCache`: a transformers cache whose keys and values lie in blocks of a pool."""

import copy
import functools
import operator

import torch
from transformers.cache_utils import Cache

from hf_efficient.cache.bookkeeping.row_tokens import RowTokens
from hf_efficient.cache.decode_step import DecodeStepMixin
from hf_efficient.cache.eviction.base import EvictionPolicy
from hf_efficient.cache.layer_groups import group_layers, make_layers, recurrent_of
from hf_efficient.cache.moves import MovesMixin
from hf_efficient.cache.paged_layer import PagedLayer
from hf_efficient.cache.stats import CacheStats
from hf_efficient.cache.stores.factory import StoreFactory, checked_block_size
from hf_efficient.cache.stores.offload import Offload


class PagedCache(DecodeStepMixin, MovesMixin, Cache):
    """Key-value cache in blocks of a pool: `generate(past_key_values=PagedCache(model.config))`.

    Under `attn_implementation="flash_paged"` the attention reads the blocks directly, and left padding takes no memory.
    Under any other implementation `update` returns ordinary contiguous keys and values. Sequences that share a
    beginning (beam search, `num_return_sequences`) share its blocks until one writes.

    Layers with a sliding window have blocks of their own, and free those that lie 64 tokens or more before the window;
    `rewind` and `crop` raise ValueError when they would need freed tokens. With `prefix_cache`, `eviction` or int4 and
    int2 pages these layers keep all tokens.

    A 2-D mask must agree with what is stored, and is checked. On an accelerator it is not checked in forwards of one
    new token per sequence, because reading it would wait for the device at every token.

    Layers with a recurrent state (Mamba, gated delta nets, short convolutions) store it beside the pages of the other
    layers. Only speculation can rewind such layers. The cache then has no `decode_step`, eviction, prefix cache,
    offload or file.

    A decoding loop can compile its decode step once for all lengths, or capture it in a CUDA graph:

    >>> cache = PagedCache(model.config, num_blocks=64)
    >>> decode = torch.compile(model.forward, fullgraph=True)
    >>> with torch.no_grad():
    ...     logits = model(input_ids, past_key_values=cache).logits  # the prompt, as usual
    ...     for _ in range(20):
    ...         input_ids = logits[:, -1:].argmax(-1)
    ...         with cache.decode_step() as position_ids:
    ...             logits = decode(input_ids, position_ids=position_ids, past_key_values=cache).logits
    >>> cache.cache_seqlens
    [25, 25]

    Args:
        config: the model's own config object (`model.config`): its attention implementation is read at every forward.
            A cache that is pickled without its model has a copy of the config; `save` and `load` need none. Pickling
            one with `prefix_cache` or `offload` raises TypeError.
        block_size: tokens per block, a power of two from 8 to 256; by default 16, and 64 for "int4", 32 for "int2".
        kv_format: how keys and values are stored. "auto": the model's dtype. "int8", "fp8" (E4M3): about half the
            memory of bfloat16. "int4", "int2": 0.28 and 0.19 of it; the first block of every sequence and its last 128
            tokens stay in the model's dtype, outside the blocks. The new tokens of a forward of more than 16
            attend to each other unquantized.
        num_blocks: blocks of a pool of fixed size in every layer, shared by all sequences; None for a pool that grows
            on demand.
        memory: instead of `num_blocks`, the bytes that the blocks of all layers may take: an int, or "512MB", "2GiB".
            The first forward raises ValueError if not one block fits.
        eviction: an `EvictionPolicy`: layers of full attention keep only some of their tokens. Needs "flash_paged";
            excludes num_blocks, memory, prefix_cache, offload, int4 and int2 pages, `decode_step`, `save` and rewinding
            to before the last eviction.
        prefix_cache: a `PrefixCache` of the same model, which keeps the common beginnings of prompts between
            generations.
        offload: an `Offload`, shared by several caches: pages that are not in use leave the device.

    Raises ValueError for other arguments and for models it cannot hold (those without attention, and encoder-decoders,
    for which there is `EncoderDecoderPagedCache`). The first forward raises it for head dims that
    int4 (multiples of 8) and int2 (of 16) cannot hold.
    """

    def __init__(
        self,
        config,
        block_size: int | None = None,
        kv_format: str = "auto",
        num_blocks: int | None = None,
        *,
        memory: int | str | None = None,
        eviction: EvictionPolicy | None = None,
        prefix_cache=None,
        offload: Offload | None = None,
    ):
        block_size = checked_block_size(kv_format, block_size, num_blocks, memory, offload)
        if not hasattr(config, "get_text_config"):
            raise ValueError(f"config={type(config).__name__}: must be a transformers config, such as model.config")
        if prefix_cache is not None:
            if not callable(getattr(prefix_cache, "check", None)):
                raise ValueError(f"prefix_cache={prefix_cache!r}: must be an hf_efficient.PrefixCache")
            prefix_cache.check(config, block_size, kv_format)
        self.row_tokens = None if prefix_cache is None else RowTokens()
        self.noted_forward = -1  # the number of the last forward in which recurrent layers noted their states
        self.kv_format, self.eviction, self.prefix_cache = kv_format, eviction, prefix_cache
        decoder = config.get_text_config(decoder=True)
        # these store and share whole sequences, also what lies behind a window
        keeps_all = prefix_cache is not None or eviction is not None or kv_format in ("int4", "int2")
        self.states, groups = group_layers(config, decoder, block_size, num_blocks, keeps_all)
        self.state = self.states[0]
        layer_types, states = [kind for kind, _ in groups], [state for _, state in groups if state is not None]
        stores = StoreFactory(states, layer_types, kv_format, num_blocks, memory, eviction, prefix_cache, offload)
        self.budget, self.tiers = stores.budget, stores.tiers
        # with a prefix cache prompts do not run from their beginning, so their bits are others in any case
        exact = prefix_cache is None
        super().__init__(layers=make_layers(decoder, groups, eviction is not None, exact))
        if self.recurrent_layers and not (eviction is None and prefix_cache is None and offload is None):
            raise ValueError(
                f"config={type(config).__name__} has layers with a recurrent state: PagedCache holds them without "
                "eviction, prefix_cache and offload"
            )
        for layer in self._paged_layers:
            layer.stores, layer.state.last_layer = stores, layer.layer_idx

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.state.pool.block_size

    @property
    def reads_pages(self) -> bool:
        """Whether the model's attention reads the blocks."""
        return self.state.reads_pages

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile its decode step: with a pool of fixed size whose blocks the attention reads,
        without a `prefix_cache`, which does not see what a compiled forward appends, and without `offload`, which moves
        pages."""
        is_fixed = self.state.pool.num_blocks is not None or self.budget is not None
        is_fixed = is_fixed and not self.recurrent_layers
        return is_fixed and self.reads_pages and self.prefix_cache is None and self.tiers is None

    @property
    def cache_seqlens(self) -> list[int]:
        """Tokens stored per sequence; empty before first use."""
        return list(self.state.lengths)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use in one of the layers that keep most tokens, shared ones counted once; with eviction those of
        all layers."""
        if self.eviction is not None:
            return self.stats().blocks_used
        return self.state.pool.capacity - self.state.pool.num_free

    def stats(self) -> CacheStats:
        """Blocks, tokens and bytes in use."""
        return CacheStats.of(self)

    def park(self) -> None:
        """Moves all pages to the host. They come back when this cache is used.

        Raises ValueError without `offload`.
        """
        self.state.check_idle()
        if self.tiers is None:
            raise ValueError("park() needs PagedCache(offload=Offload(...))")
        self.tiers.park()

    @property
    def batch_size(self) -> int:
        """Sequences in the cache; -1 before first use."""
        return len(self.state.pool.lengths) or -1

    @functools.cached_property
    def _paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @functools.cached_property
    def recurrent_layers(self) -> list:
        """The `RecurrentLayer`s, which hold the states of layers that have one."""
        return recurrent_of(self.layers)

    def check_continuation(self, attention_mask: torch.Tensor | None) -> None:
        """Raises ValueError if `generate()` cannot continue from this cache. It appends all next tokens in the same
        column, so sequences must end in the same one; after speculation they may not. The mask must have the padding of
        what was stored.

        attention_mask: [B, columns] as `generate()` takes it; None for no padding.
        """
        lengths, columns = self.cache_seqlens, self.state.columns
        padding = [0] * len(lengths)
        has_mask = self.reads_pages and attention_mask is not None
        if has_mask:
            padding = (attention_mask[:, :columns] == 0).sum(1).tolist()
        if any(length + pads != columns for length, pads in zip(lengths, padding)):
            raise ValueError(
                f"past_key_values holds rows of {lengths} tokens: a batch is continued only when all its rows end at "
                "the same column. Rewind them with cache.rewind, or continue row by row"
            )
        if has_mask and attention_mask.shape[1] >= columns:  # one of new tokens alone says nothing of those stored
            self.state.check_mask(attention_mask)

    def rewind(self, lengths: list[int]) -> None:
        """Shortens sequence b to `lengths[b]` tokens (at most what it has) and frees the blocks beyond.

        Afterwards `get_seq_length()` is the longest sequence. If lengths differ, the next forward needs `position_ids`.
        Under "flash_paged" a 2-D mask, if any, has padding on the left. Under other attention implementations padding
        is on the right: the forward needs a 4-D mask, and raises ValueError without one.
        """
        self.state.check_idle()
        lengths = [int(length) for length in lengths]
        self._check_rewind(lengths)
        held = self.cache_seqlens
        self.state.rewind(lengths)
        self._rewind_stores(held)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` columns (a whole number <= 0) of all sequences."""
        tokens_to_remove = operator.index(tokens_to_remove)
        self.state.check_idle()
        self._check_rewind(self.state.cropped(tokens_to_remove)[1])
        held = self.cache_seqlens
        self.state.crop(tokens_to_remove)
        self._rewind_stores(held)

    def _check_rewind(self, lengths: list[int]) -> None:
        for layer in self._paged_layers:
            if layer.is_initialized:
                dropped = layer.state.pool.dropped
                layer.store.check_rewind([max(length - number, 0) for length, number in zip(lengths, dropped)])
        if any(lengths):
            for layer in self.recurrent_layers:
                if self.noted_forward != self.state.num_forwards:
                    layer.forget_notes()  # of states before an earlier forward
                layer.check_take_back([held - length for held, length in zip(self.state.lengths, lengths)])

    def _rewind_stores(self, held: list[int] | None = None) -> None:
        """Has the layers follow the shortened sequences, which had `held` tokens; None where all layers hold pages."""
        for layer in self.recurrent_layers:
            if any(self.state.lengths):
                layer.take_back([before - length for before, length in zip(held, self.state.lengths)])
            else:
                layer.forget()
        for layer in self._paged_layers:
            if layer.is_initialized:
                layer.store.rewind(layer.state.pool.lengths)
        if self.row_tokens is not None:
            self.row_tokens.rewind(self.state.pool.lengths)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what sequence `beam_idx[i]` was. Copies nothing: sequences that come from the same one share
        its blocks."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences of `indices` (int64 indices, or a bool mask over the sequences). None are kept by
        `reset()`."""
        self.state.check_idle()
        if self.state.pool.lengths:
            indices = torch.as_tensor(indices).cpu()
            if indices.dtype == torch.bool and len(indices) != len(self.state.pool.lengths):
                raise ValueError(f"a mask over {len(indices)} sequences, and there are {len(self.state.pool.lengths)}")
            indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            if len(indices) == 0:
                return self.reset()
            self.state.select(indices)
            for layer in self._paged_layers:
                if layer.is_initialized:
                    layer.store.select(indices.tolist())
            for layer in self.recurrent_layers:
                layer.select(indices)
            if self.row_tokens is not None:
                self.row_tokens.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times; the copies share their blocks."""
        self.batch_select_indices(torch.arange(len(self.state.pool.lengths)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forgets all tokens, the tensors and the batch size."""
        for state in self.states:
            state.reset()
        for layer in (*self._paged_layers, *self.recurrent_layers):
            layer.forget()
        if self.budget is not None:
            self.budget.forget()
        if self.row_tokens is not None:
            self.row_tokens.reset()

    def __getstate__(self):
        if self.prefix_cache is not None or self.tiers is not None:
            name = "prefix_cache" if self.prefix_cache is not None else "offload"
            raise TypeError(f"a PagedCache with {name} cannot be pickled: it is shared by caches of this process")
        return self.__dict__

    def __deepcopy__(self, memo):
        self.state.check_idle()
        memo.setdefault(id(self.state.config), self.state.config)  # still the model's own, or that of its copy
        duplicate = memo[id(self)] = type(self).__new__(type(self))
        duplicate.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return duplicate
