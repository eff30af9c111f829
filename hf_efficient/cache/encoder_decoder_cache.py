"""`EncoderDecoderPagedCache`: pages for the decoder's own tokens, and the encoder's output stored once."""

import copy

import torch
from transformers.cache_utils import EncoderDecoderCache

from hf_efficient.cache.cross_attention import CrossAttentionCache
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.cache.stats import CacheStats


def encoder_decoder_config(config):
    """`config`, or a copy that counts as an encoder-decoder's where it is that of the decoder alone, as
    `WhisperForCausalLM` has, which describes both."""
    if config.is_encoder_decoder:
        return config
    config = copy.deepcopy(config)
    config.is_encoder_decoder = True
    return config


class EncoderDecoderPagedCache(EncoderDecoderCache):
    """The cache of encoder-decoder models such as T5, BART, Marian and Whisper:
    `generate(past_key_values=EncoderDecoderPagedCache(model.config))`.

    `self_attention_cache` is a `PagedCache` of the decoder's tokens. Its beams and samples share pages until one of
    them writes. `cross_attention_cache` stores the keys and values of cross attention once per source, in the model's
    dtype, however many beams and samples read it.

    A cache serves one generation. Whisper's long-form transcription runs several: leave out `past_key_values` there,
    and set `model.generation_config.cache_implementation` to "paged" or "paged_int8", which makes a cache for each.

    Args:
        config: the model's own config object (`model.config`).
        block_size, kv_format, num_blocks, memory: of the decoder's pages, as in `PagedCache`.
        source_room: (sources, tokens of a source) to allocate on a CPU, in tensors that captured forwards read again.
            None: as much as is stored.

    Raises ValueError as `PagedCache` does, and for models that are no encoder-decoders.
    """

    def __init__(
        self,
        config,
        block_size: int | None = None,
        kv_format: str = "auto",
        num_blocks: int | None = None,
        *,
        memory: int | str | None = None,
        source_room: tuple[int, int] | None = None,
    ):
        if not getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"config={type(config).__name__}: EncoderDecoderPagedCache holds encoder-decoder models; use PagedCache"
            )
        decoder = config.get_text_config(decoder=True)
        is_copy = decoder.is_encoder_decoder  # of a config that describes encoder and decoder in one
        if is_copy:
            decoder.is_encoder_decoder = False
            decoder.num_hidden_layers = getattr(config, "num_decoder_layers", None) or decoder.num_hidden_layers
        pages = PagedCache(decoder, block_size, kv_format, num_blocks, memory=memory)
        for state in pages.states if is_copy else ():
            state.config = config  # whose attention implementation is read at every forward
        super().__init__(pages, CrossAttentionCache(source_room))

    @property
    def is_compileable(self) -> bool:
        """False: a compiled decode step would hold on to one encoder's output."""
        return False

    @property
    def cache_seqlens(self) -> list[int]:
        """Decoder tokens stored per sequence; empty before first use."""
        return self.self_attention_cache.cache_seqlens

    def stats(self) -> CacheStats:
        """Blocks, tokens and bytes in use of the decoder's pages. The encoder's output takes
        `cross_attention_cache.nbytes` more."""
        return self.self_attention_cache.stats()

    def reset(self) -> None:
        """Forgets the decoder's tokens and the encoder's output."""
        super().reset()
        self.is_updated.clear()

    def rewind(self, lengths: list[int]) -> None:
        """As `PagedCache.rewind`, of the decoder's tokens."""
        self.self_attention_cache.rewind(lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """As `PagedCache.crop`, of the decoder's tokens."""
        self.self_attention_cache.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what sequence `beam_idx[i]` was, without a copy while every source keeps a beam."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences of `indices` (int64 indices, or a bool mask over the sequences)."""
        indices = torch.as_tensor(indices).cpu()
        self.self_attention_cache.batch_select_indices(indices)
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        if len(rows):
            self.cross_attention_cache.select(rows.tolist())
        else:
            self.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times; the copies share pages and the encoder's output."""
        self.batch_select_indices(torch.arange(len(self.cache_seqlens)).repeat_interleave(repeats))
