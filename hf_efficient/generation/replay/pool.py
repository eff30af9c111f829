"""The replay pool: captured forwards that wait for the next `generate()` call, each with the cache that it reads."""

import threading
from dataclasses import dataclass, replace

import torch

from hf_efficient.cache.bookkeeping.tensors import to_device
from hf_efficient.cache.encoder_decoder_cache import EncoderDecoderPagedCache, encoder_decoder_config
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.state_cache import StateCache
from hf_efficient.cache.stats import CacheStats, written_bytes
from hf_efficient.generation.replay.captured_forward import MAX_TOKENS, CapturedForward


# Written in a cache on a CPU: one with more bytes, and with more than this share of the model's weights, is dropped
# after the call.
MAX_CACHE_BYTES, MAX_CACHE_SHARE = 256 << 20, 0.5
MAX_SOURCE_BYTES = 1 << 30  # of the keys and values of sources, on a CPU: eight windows of whisper-small in float32
MAX_CUDA_CACHE_BYTES = 1 << 30  # allocated by a cache on a CUDA device: one with more is dropped after the call
# Tokens of a page: on a CPU few, so that short sequences take little; a CUDA kernel reads pages of 64 in whole tiles.
PAGE_TOKENS = {"cpu": 16, "cuda": 64}
MAX_MEMORY_SHARE = 0.5  # of a device's free memory for a cache of fixed size; beyond, it grows with its tokens
MAX_RESERVED_TOKENS = 1 << 22  # of all sequences, in a cache of fixed size, which lists all its pages; beyond, it grows
MAX_ENTRIES = 2  # of a model: with and without the hidden states that draft heads read
MIN_CACHE_TOKENS = 512  # of a sequence, so that short calls share a cache


@dataclass(frozen=True, eq=False)
class PoolEntry:
    """A cache and the forwards captured over it.

    captured: None before the first forward that may be captured.
    hidden_layers: the hidden states that the captured forwards return besides logits (see `RaggedModel`).
    is_capturable: whether forwards over the cache may be captured: its pages have a fixed number.
    is_reusable: whether the pool takes it back after the call.
    """

    cache: PagedCache | EncoderDecoderPagedCache | StateCache
    captured: CapturedForward | None = None
    hidden_layers: tuple[int, ...] | None = None
    is_capturable: bool = False
    is_reusable: bool = False

    @classmethod
    def growing(cls, config, over_pages: bool = False) -> "PoolEntry":
        """An empty cache that grows, so that nothing can be captured over it. over_pages: "sdpa" reads its pages."""
        cache = PagedCache(config)
        if over_pages:
            cache.attend_over_pages()
        return cls(cache)

    @classmethod
    def beside_encoder(cls, config) -> "PoolEntry":
        """As `growing`, for a model whose decoder reads an encoder's output."""
        return cls(EncoderDecoderPagedCache(encoder_decoder_config(config)))

    @classmethod
    def of_states(cls, config) -> "PoolEntry":
        """For a model of which all layers have a recurrent state."""
        return cls(StateCache(config))

    @property
    def pages(self) -> PagedCache:
        """The cache of the decoder's own tokens."""
        return getattr(self.cache, "self_attention_cache", self.cache)

    def has_room(self, blocks: int, sources: tuple[int, int] | None) -> bool:
        """Whether so many blocks of the decoder's pages, and sources as in `ReplayPool.take`, fit."""
        room = None if sources is None else self.cache.cross_attention_cache.room
        return self.pages.state.pool.num_blocks >= blocks and (
            sources is None or all(has >= needs for has, needs in zip(room, sources))
        )

    def clear(self, rows: int) -> None:
        """Makes the cache one of `rows` empty sequences."""
        present = self.pages.batch_size
        self.pages.rewind([0] * present)
        if present != rows:
            self.pages.batch_select_indices(torch.zeros(rows, dtype=torch.int64))
        if self.cache is not self.pages:
            self.cache.cross_attention_cache.reset()
            self.cache.is_updated.clear()


class ReplayPool:
    """The entries of one model, valid as long as nothing about the model changes.

    Args:
        is_capturable: whether forwards of the model may be captured.
        over_pages: its attention "sdpa" is run over the pages of the cache.
        keeps_entries: whether anything is kept between calls.
        model: whose device, dtype and size are looked at; it is not kept.
    """

    def __init__(self, is_capturable: bool, over_pages: bool, keeps_entries: bool, model):
        self.device, self.dtype = model.device, model.dtype
        self._kept_bytes = int(MAX_CACHE_SHARE * model.get_memory_footprint())
        self.is_capturable, self.over_pages, self.keeps_entries = is_capturable, over_pages, keeps_entries
        self.entries: list[PoolEntry] = []  # the latest used last
        self._lock = threading.Lock()

    def take(
        self, config, rows: int, tokens: int | None, hidden_layers=None, is_reusable: bool = True, source_tokens=None
    ) -> PoolEntry:
        """An entry with room for `rows` sequences of `tokens` tokens: one that a call has put back, else a new one.
        Nobody else is given it before `put`. Its cache grows where nothing can be captured, `tokens` is None, or they
        are more than `MAX_RESERVED_TOKENS`.

        config: of the model that runs over the cache. is_reusable: whether another call can replay what is captured.
        source_tokens: of what the decoder of an encoder-decoder reads; None for other models.
        """
        grows = tokens is None or not self.is_capturable or rows * tokens > MAX_RESERVED_TOKENS
        if source_tokens is not None and (grows or rows > MAX_TOKENS):
            return PoolEntry.beside_encoder(config)
        if grows:
            return PoolEntry.growing(config, self.over_pages)
        sources = None if source_tokens is None else (rows, 1 << (source_tokens - 1).bit_length())
        entry = self._pop(hidden_layers) if is_reusable else None
        tokens = max(MIN_CACHE_TOKENS, 1 << (tokens - 1).bit_length())
        page = PAGE_TOKENS.get(self.device.type, PAGE_TOKENS["cpu"])
        blocks = rows * -(-tokens // page)
        if entry is not None and entry.has_room(blocks, sources):
            entry.clear(rows)
            return entry
        if self.device.type == "cuda" and self._bytes(config, blocks * page) > MAX_MEMORY_SHARE * self._free_bytes():
            return PoolEntry.growing(config, self.over_pages)
        if sources is None:
            cache = PagedCache(config, page, num_blocks=blocks)
        else:
            config = encoder_decoder_config(config)
            cache = EncoderDecoderPagedCache(config, page, num_blocks=blocks, source_room=sources)
        entry = PoolEntry(cache, None, hidden_layers, is_capturable=True, is_reusable=is_reusable)
        if self.over_pages:
            entry.pages.attend_over_pages()
        for layer in entry.pages.layers:
            layer.exact = False  # nobody else sees this cache: attention reads its pages in place, prompts too
        return entry

    def _bytes(self, config, tokens: int) -> int:
        """About what a cache of so many tokens takes."""
        config = config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        heads = getattr(config, "num_key_value_heads", None) or heads
        return 2 * config.num_hidden_layers * heads * dim * self.dtype.itemsize * tokens

    def _free_bytes(self) -> int:
        """Of the device, what torch holds in reserve among it."""
        reserve = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + reserve

    def _pop(self, hidden_layers) -> PoolEntry | None:
        with self._lock:
            entry = next((entry for entry in self.entries if entry.hidden_layers == hidden_layers), None)
            if entry is not None:
                self.entries.remove(entry)
        return entry

    def _is_large(self, entry: PoolEntry) -> bool:
        if entry.cache is not entry.pages and entry.cache.cross_attention_cache.written_bytes > MAX_SOURCE_BYTES:
            return True
        if self.device.type == "cpu":
            return written_bytes(entry.pages) > max(MAX_CACHE_BYTES, self._kept_bytes)
        return CacheStats.of(entry.pages).bytes_allocated > MAX_CUDA_CACHE_BYTES

    def put(self, entry: PoolEntry, captured: CapturedForward | None) -> None:
        """Takes an entry back after a call, with what was captured over its cache. The caller gives it up."""
        if captured is None or not entry.is_reusable or not self.keeps_entries:
            return
        if self._is_large(entry):
            return
        captured.forward = captured.is_unchanged = captured.changes_model = None  # they refer to the model
        if captured.prompt is not None:
            captured.prompt.forward = captured.prompt.new_capture = None
        with self._lock:
            others = [other for other in self.entries if other.hidden_layers != entry.hidden_layers]
            self.entries = [*others, replace(entry, captured=captured)][-MAX_ENTRIES:]


def copied(cache: PagedCache, config) -> PagedCache:
    """The contents of `cache`, whose pages are in the model's dtype, in a cache that grows. config: the model's."""
    copy, device = PagedCache(config, cache.state.pool.block_size), cache._paged_layers[0].device
    blocks = []
    for state, other in zip(copy.states, cache.states):
        used = list(dict.fromkeys(block for table in other.pool.tables for block in table))
        new_id = {block: index for index, block in enumerate(used)}
        tables = [[new_id[block] for block in table] for table in other.pool.tables]
        held = {**other.pool.snapshot(), "capacity": len(used), "tables": tables, "columns": other.columns}
        state.restore(held, None if other.column_mask is None else other.column_mask.clone())
        blocks.append(to_device(used, torch.int64, device))
    for layer, other in zip(copy._paged_layers, cache._paged_layers):
        pages = other.store.pages
        layer.lazy_initialization(*(pages[name][:1].transpose(1, 2) for name in ("keys", "values")))
        for name, values in layer.store.pages.items():
            values.copy_(pages[name][blocks[copy.states.index(layer.state)]])
    return copy
