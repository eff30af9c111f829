"""The keys and values of cross attention: what a decoder sees of its encoder's output, stored once a source."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class CrossAttentionLayer(CacheLayerMixin):
    """Keys and values of one decoder layer for the encoder's output. They are written once and never grow.

    Rows of a batch that were given equal keys and values, as beams and samples of one source are, share one copy of
    them. Reordering, repeating and selecting rows moves no tensor while every source keeps a row.

    stored: keys [sources, H, n, D] and values [sources, H, n, Dv]; None before the first forward.
    source: for each row of the batch the index of its source.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self):
        super().__init__()
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
        self.is_initialized = True

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
    differs = ((keys[1:] != keys[:-1]).flatten(1).any(1)) | ((values[1:] != values[:-1]).flatten(1).any(1))
    return [0, *differs.long().cumsum(0).tolist()]


class CrossAttentionCache(Cache):
    """The `CrossAttentionLayer` of every decoder layer."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=CrossAttentionLayer)

    def select(self, rows: list[int]) -> None:
        for layer in self.layers:
            layer.select(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for layer in self.layers for x in layer.stored or ())
