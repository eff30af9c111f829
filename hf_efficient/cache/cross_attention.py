"""The keys and values of cross attention, computed from the encoder's output and stored once per source."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_efficient.cache.bookkeeping.tensors import lazy_zeros
from hf_efficient.cache.page_handle import PAGES
from hf_efficient.kernels.attention import api


PAGE_TOKENS = 64  # of a page of sources that lie in a room of fixed size


class CrossAttentionLayer(CacheLayerMixin):
    """Keys and values of one decoder layer for the encoder's output. They are written once and never grow.

    Rows of a batch that were given equal keys and values, as beams and samples of one source are, share one copy of
    them. Reordering, repeating and selecting rows moves no tensor while every source keeps a row.

    room: (sources, tokens) that there is room for, in tensors that stay where they are until the cache is gone, so that
        captured forwards can read them; None for tensors as large as what is stored.

    stored: keys [sources, H, n, D] and values [sources, H, n, Dv]; None before the first forward.
    source: for each row of the batch the index of its source.
    pages: with a room, keys and values [pages, PAGE_TOKENS, 1, D] of all sources. Each head has pages of its own, which
        a processor reads from end to end. table, lengths: int32 [rows, H, pages of a head] and [rows, H], which pages
        each row reads, and how many tokens it sees.
    reads_in_place: `keys` and `values` stand for the pages: the paged attention reads them. was_read: it did.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, room: tuple[int, int] | None = None):
        super().__init__()
        self.room, self.pages, self.reads_in_place, self.was_read = room, None, False, False
        self._written = 0
        self.reset()

    @property
    def keys(self) -> torch.Tensor | None:
        """[rows, H, n, D]: the stored tensor where each source has one row, a view of it where there is one source, and
        else a copy, made at every access."""
        return self._rows(0)

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return self._rows(1)

    @keys.setter
    def keys(self, value) -> None:
        self._refuse_assignment(value)

    @values.setter
    def values(self, value) -> None:
        self._refuse_assignment(value)

    @staticmethod
    def _refuse_assignment(value) -> None:
        if value is not None:  # transformers' base class sets None
            raise AttributeError("cross attention: keys and values are written by update() alone")

    def _rows(self, index: int) -> torch.Tensor | None:
        if self.stored is None:
            return None
        if self.reads_in_place:
            part = self.pages[index][:1, :1].expand(len(self.source), self.lengths.shape[1], -1, -1)
            setattr(part, PAGES, SourceHandle(self))
            return part
        stored, sources = self.stored[index], len(self.stored[index])
        if self.source == list(range(sources)):
            return stored
        if sources == 1:
            return stored.expand(len(self.source), *stored.shape[1:])
        return stored[torch.tensor(self.source, device=stored.device)]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.source = _sources(key_states, value_states)
        first = torch.tensor([self.source.index(source) for source in range(self.source[-1] + 1)])
        is_one_each = len(first) == len(self.source)
        self.stored = tuple(x if is_one_each else x[first.to(x.device)] for x in (key_states, value_states))
        if self.room is not None:
            self._move_in()
        self.is_initialized = True

    def _move_in(self) -> None:
        rows, columns, heads = self.room[0], -(-self.room[1] // PAGE_TOKENS), self.stored[0].shape[1]
        if self.pages is None:
            with torch.inference_mode(False):
                self.table = torch.zeros(rows, heads, columns, dtype=torch.int32)
                self.lengths = torch.zeros(rows, heads, dtype=torch.int32)
                self.pages = tuple(
                    lazy_zeros(x, rows * heads * columns, PAGE_TOKENS, 1, x.shape[3]) for x in self.stored
                )
        sources, _, length, _ = self.stored[0].shape
        self._written = max(self._written, sources * heads * -(-length // PAGE_TOKENS))
        whole = [pages.view(rows, heads, columns * PAGE_TOKENS, -1)[:sources, :, :length] for pages in self.pages]
        self.stored = tuple(to.copy_(x) for to, x in zip(whole, self.stored))

    @property
    def written_bytes(self) -> int:
        """Of the pages: those of the largest number of the longest sources so far."""
        return 0 if self.pages is None else sum(self._written * pages[0].nbytes for pages in self.pages)

    def see(self, lengths: list[int]) -> None:
        """Of its source row i sees the first `lengths[i]` tokens, under the paged attention."""
        rows, pages = len(lengths), self.table[0].numel()
        first = torch.tensor(self.source, dtype=torch.int32)[:, None] * pages
        self.table[:rows] = (first + torch.arange(pages, dtype=torch.int32)).view(rows, *self.table.shape[1:])
        self.lengths[:rows] = torch.tensor(lengths, dtype=torch.int32)[:, None]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Stores keys [rows, H, n, D] and values [rows, H, n, Dv], and returns them.

        Raises RuntimeError where the layer holds some already, or gradients are asked for.
        """
        if self.is_initialized:
            raise RuntimeError(
                "the cross attention of this cache holds an encoder's output already: call reset() before another one"
            )
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "EncoderDecoderPagedCache keeps no gradients: wrap the forward in torch.no_grad(), or train without a "
                "cache (use_cache=False)"
            )
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was. Sources that lose all their rows are freed."""
        if self.stored is None:
            return
        source = [self.source[row] for row in rows]
        if self.room is not None:  # nothing moves
            self.source = source
            return
        kept = sorted(set(source))
        if len(kept) < len(self.stored[0]):
            self.stored = tuple(x[torch.tensor(kept, device=x.device)] for x in self.stored)
        self.source = [kept.index(each) for each in source]

    def reset(self) -> None:
        self.stored: tuple[torch.Tensor, torch.Tensor] | None = None
        self.source: list[int] = []
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return 0 if self.stored is None else self.stored[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1


def _sources(keys: torch.Tensor, values: torch.Tensor) -> list[int]:
    """For each row the number of its source: a row starts a new one where it differs from the row before it."""
    numbers = [0]
    for row in range(1, len(keys)):
        begins = not torch.equal(keys[row, :, :1], keys[row - 1, :, :1])  # few sources begin alike
        is_same = not begins and all(torch.equal(x[row], x[row - 1]) for x in (keys, values))
        numbers.append(numbers[-1] + (not is_same))
    return numbers


class SourceHandle:
    """What stands for the pages of a `CrossAttentionLayer`, as a `PageHandle` does for those of a `PagedLayer`."""

    __slots__ = ("layer",)
    written = True

    def __init__(self, layer: CrossAttentionLayer):
        self.layer = layer

    def attend(self, query, key, value, attention_mask, *, softmax_scale, softcap, **options):
        """Attention of `query` [B, Hq, S, D] over what each row sees of its source: [B, S, Hq, Dv]."""
        layer, (rows, _, width, dim) = self.layer, query.shape
        layer.was_read = True
        table, lengths = layer.table[:rows].flatten(0, 1), layer.lengths[:rows].flatten()
        query = query.reshape(len(lengths), -1, width, dim).transpose(1, 2)  # each head of keys as a row of its own
        output = api.flash_attn_with_kvcache(
            query, *layer.pages, cache_seqlens=lengths, block_table=table, softmax_scale=softmax_scale, softcap=softcap
        )
        return output.transpose(1, 2).reshape(rows, -1, width, output.shape[-1]).transpose(1, 2)


class CrossAttentionCache(Cache):
    """The `CrossAttentionLayer` of every decoder layer. room: see there."""

    def __init__(self, room: tuple[int, int] | None = None):
        super().__init__(layer_class_to_replicate=partial(CrossAttentionLayer, room))
        self.room = room
        self.lengths: list[int] | None = None

    def see(self, lengths: list[int]) -> None:
        """As in `CrossAttentionLayer`, in all of them."""
        self.lengths = lengths
        for layer in self.layers:
            layer.see(lengths)

    @contextmanager
    def read_in_place(self) -> Iterator[None]:
        """For one forward under the paged attention that reads the sources where they lie, without a mask of them.

        Raises RuntimeError where a layer's attention did not get them.
        """
        for layer in self.layers:
            layer.reads_in_place, layer.was_read = True, False
        try:
            yield
        finally:
            for layer in self.layers:
                layer.reads_in_place = False
        if not all(layer.was_read for layer in self.layers):
            raise RuntimeError("the model changed the keys of its cross attention")

    def select(self, rows: list[int]) -> None:
        for layer in self.layers:
            layer.select(rows)
        if self.lengths is not None:
            self.see([self.lengths[row] for row in rows])

    def reset(self) -> None:
        super().reset()
        self.lengths = None

    @property
    def written_bytes(self) -> int:
        """As in `CrossAttentionLayer`, of all of them."""
        return sum(layer.written_bytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for layer in self.layers for x in layer.stored or ())
