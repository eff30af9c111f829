"""The cache of a model whose layers all have a recurrent state, such as Mamba: states without pages."""

from contextlib import nullcontext

import torch
from transformers.cache_utils import Cache

from hf_efficient.cache.layer_groups import RECURRENT
from hf_efficient.cache.recurrent_layer import RecurrentLayer
from hf_efficient.integrations.transformers_releases import layer_types_and_kwargs


class StateCache(Cache):
    """What a decoding loop asks of a `PagedCache`, for such a model.

    A forward does not tell how many tokens it read: the loop says so by `see`.

    Raises ValueError for a config with other layers.
    """

    reads_pages = takes_trees = False

    def __init__(self, config):
        kinds, arguments = layer_types_and_kwargs(config.get_text_config(decoder=True))
        if others := sorted(set(kinds) - set(RECURRENT)):
            raise ValueError(
                f"config={type(config).__name__}: StateCache holds recurrent states, not layers of {others}"
            )
        super().__init__(layers=[RecurrentLayer(each.get("number_of_states", 1)) for each in arguments])
        self.cache_seqlens: list[int] = []

    @property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        return self.layers

    def see(self, rows: int, tokens: int) -> None:
        """Each of `rows` sequences has `tokens` more, or as many where there were none."""
        self.cache_seqlens = [length + tokens for length in self.cache_seqlens or [0] * rows]

    def forward_context(self):
        return nullcontext()

    def rewind(self, lengths: list[int]) -> None:
        """As `PagedCache.rewind`, to where states were noted."""
        tokens = [held - length for held, length in zip(self.cache_seqlens, lengths, strict=True)]
        for layer in self.layers:
            layer.check_take_back(tokens)
        for layer in self.layers:
            layer.take_back(tokens)
        self.cache_seqlens = list(lengths)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences of `indices` int64."""
        for layer in self.layers:
            layer.select(indices)
        self.cache_seqlens = [self.cache_seqlens[index] for index in indices.tolist()]
