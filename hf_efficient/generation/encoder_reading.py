"""The `RaggedModel` for decoders that attend to an encoder's output: T5, BART, Marian, Whisper.

These decoders derive positions from the length of the cache, the same for all sequences. If sequences differ in length,
or the new tokens are a tree, the positions are passed to the one module that uses them: the position embedding, or
the first self-attention of T5, which computes the bias that all layers add to their scores.
"""

from contextlib import contextmanager
from threading import get_ident

import torch
from torch import nn

from hf_efficient.cache.encoder_decoder_cache import EncoderDecoderPagedCache
from hf_efficient.cache.page_handle import no_mask
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.model_traits import (
    decoder_of,
    has_distance_bias,
    masks_its_source,
    reads_encoder,
    skips_padding,
)
from hf_efficient.generation.source import Source
from hf_efficient.integrations.transformers_compat import cache_name
from hf_efficient.integrations.transformers_loop import prefill


# arguments of the decoder's forward that each step is given
_HANDLED = {
    "encoder_outputs", "attention_mask", "decoder_attention_mask", cache_name(), "use_cache", "logits_to_keep"
}  # fmt: skip


class EncoderReading:
    """Methods that come before those of `RaggedModel`. `cache` is the decoder's own part of `whole`, the cache that the
    model is given."""

    packs = False  # cross attention finds a sequence's source by its row

    def __init__(self, model, whole: EncoderDecoderPagedCache, *arguments, **options):
        super().__init__(model, whole.self_attention_cache, *arguments, **options)
        self.whole, self._cached = whole, {cache_name(): whole, "use_cache": True}
        self._has_bias, self._bias = has_distance_bias(model), None

    def prefill(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> torch.Tensor:
        """Runs the first decoder tokens, int64 [rows, columns], with `model_kwargs` as `generate()` made them; they
        hold `encoder_outputs`, and `attention_mask` of the encoder where its input has padding."""
        self.extra, self.mask = {}, None
        self.source = Source(self.model, model_kwargs["encoder_outputs"], self._encoder_mask(model_kwargs))
        lengths, mask = source_lengths(self.model, self.source), self._prompt_mask(model_kwargs)
        bias_sees_padding = self._has_bias and mask is not None
        self.is_capturable = self.is_capturable and lengths is not None and not bias_sees_padding
        self._take_captures()
        if self._has_bias and (self.is_capturable or bias_sees_padding):
            self.cache.attend_over_pages(False)
        if self._has_bias and self.is_capturable:
            self._bias = self._kept_bias(distance_bias(decoder_of(self.model)))
        model_kwargs = {**model_kwargs, **self._cached}
        with self._collecting_hidden(), self.cache.forward_context():
            logits = prefill(self.model, input_ids, generation_config, model_kwargs).logits[:, -1]
        self._check_first_layers()
        if self.is_capturable:
            self.whole.cross_attention_cache.see(lengths)
        self.prompt = list(self.cache.cache_seqlens)
        self.position = self._last_position(mask)
        self.mask = None if mask is None or self.cache.reads_pages else mask.to(self.model.device)
        return logits

    def _kept_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """`bias`, in the tensor that forwards captured before read."""
        if self.captured is None:
            return bias
        if self.captured.bias is None:
            self.captured.bias = bias
        return self.captured.bias.copy_(bias)

    def _encoder_mask(self, model_kwargs: dict) -> torch.Tensor | None:
        return model_kwargs.get("attention_mask") if self.model.config.is_encoder_decoder else None

    def _prompt_mask(self, model_kwargs: dict) -> torch.Tensor | None:
        """Of the decoder's prompts, bool [rows, columns]; None where none is padded."""
        mask = model_kwargs.get("decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask")
        return None if mask is None or bool(mask.all()) else mask.bool()

    def _last_position(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Of the last token of each prompt, int64 [rows, 1]."""
        if mask is None or self._has_bias:  # which tells columns apart, wherever they begin
            last = torch.tensor(self.prompt)
        else:
            last = mask.sum(1) if skips_padding(self.model) else torch.full((len(mask),), mask.shape[1])
        return (last[:, None] - 1).to(self.model.device)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        takes = self.model.config.is_encoder_decoder
        inputs = {"decoder_input_ids" if takes else "input_ids": tokens}
        inputs["decoder_attention_mask" if takes else "attention_mask"] = no_mask()
        positions_given = _positions_given(decoder_of(self.model), positions, bias=self._bias)
        with positions_given, self.whole.cross_attention_cache.read_in_place(), self.cache.forward_context():
            outputs = self.source.encoder_outputs  # that they are there is all that is read of them
            logits = self.model(**inputs, encoder_outputs=outputs, **self._cached, return_dict=True).logits
        return logits, logits.argmax(-1), None

    def _replay(self, tokens, positions, tree) -> tuple | None:
        """Where a bias stands for positions, captured forwards alone read pages: others add that of all columns."""
        if not self._has_bias:
            return super()._replay(tokens, positions, tree)
        self.cache.attend_over_pages()
        try:
            return super()._replay(tokens, positions, tree)
        finally:
            self.cache.attend_over_pages(False)

    def _run(self, tokens, positions, mask, columns: list[int], tree, keep: int) -> torch.Tensor:
        takes = self.model.config.is_encoder_decoder
        inputs = {"decoder_input_ids" if takes else "input_ids": tokens}
        if mask is not None:
            inputs["decoder_attention_mask" if takes else "attention_mask"] = mask
        if takes and self.source.attention_mask is not None:
            inputs["attention_mask"] = self.source.attention_mask
        keys = self._key_positions(columns, positions, tree)
        with _positions_given(decoder_of(self.model), positions, keys):
            return self.model(
                **inputs, encoder_outputs=self.source.encoder_outputs, **self._cached, return_dict=True
            ).logits

    @staticmethod
    def _key_positions(columns: list[int], positions: torch.Tensor, tree) -> torch.Tensor:
        """Positions of the columns of the cache after a forward whose new tokens start at `columns`, int64
        [rows, longest + width]: of a tree those of its nodes."""
        width = positions.shape[1]
        keys = torch.arange(max(columns) + width, device=positions.device).repeat(len(columns), 1)
        if tree is not None:
            starts = torch.tensor(columns, device=keys.device)[:, None]
            keys.scatter_(1, starts + torch.arange(width, device=keys.device), positions)
        return keys

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.whole.cross_attention_cache.select(rows)
        self.source = self.source.rows(rows)


def source_lengths(model, source: Source) -> list[int] | None:
    """How many tokens of its source each row sees; None where these are not the first ones of it."""
    rows, length = source.encoder_outputs.last_hidden_state.shape[:2]
    mask = source.attention_mask
    if mask is None or not masks_its_source(model):
        return [length] * rows
    mask = mask.bool()
    if mask.shape != (rows, length) or bool((mask[:, 1:] > mask[:, :-1]).any()) or not bool(mask[:, 0].all()):
        return None
    return mask.sum(1).tolist()


def kind_of_cache(model) -> type:
    """The class of cache that speculation runs `model` over."""
    return EncoderDecoderPagedCache if reads_encoder(model) else PagedCache


def unknown_arguments(model, model_kwargs: dict) -> list[str]:
    """Arguments of the decoder's forward that steps after the first would not be given."""
    handled = _HANDLED | {"inputs_embeds"} if model.config.is_encoder_decoder else _HANDLED  # the encoder has read them
    return sorted(key for key, value in model_kwargs.items() if value is not None and key not in handled)


def distance_bias(decoder) -> torch.Tensor:
    """What T5's decoder adds to the scores of keys so far behind a query, float [1, heads, distances]; the last number
    is for all greater distances, too."""
    attention = _first_attention(decoder)
    distances = torch.arange(attention.relative_attention_max_distance + 1, device=decoder.device)
    return _bias_of(attention, -distances).t().float().contiguous()[None]


def _first_attention(decoder):
    return decoder.block[0].layer[0].SelfAttention


def _bias_of(attention, offsets: torch.Tensor) -> torch.Tensor:
    """[..., heads], for keys at `offsets` int64 [...] from the query, none of them behind it."""
    bucket = attention._relative_position_bucket(
        offsets,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias(bucket)


@contextmanager
def _positions_given(decoder, positions: torch.Tensor, keys: torch.Tensor | None = None, bias=None):
    """Inside, a forward of `decoder` on this thread has its new tokens at `positions` [rows, width], and the columns of
    its cache at `keys` [rows, columns]. bias: what `distance_bias` gave, in place of `keys`, over pages."""
    thread = get_ident()
    if hasattr(decoder, "embed_positions"):

        def within(module, inputs, keywords):  # its own positions, which are not used, may lie beyond the table
            if get_ident() == thread:
                return inputs, {**keywords, "position_ids": torch.zeros_like(positions[0])}

        def embed(module, inputs, output):
            if get_ident() == thread:
                return nn.Embedding.forward(module, positions + getattr(module, "offset", 0))

        handles = [
            decoder.embed_positions.register_forward_pre_hook(within, with_kwargs=True),
            decoder.embed_positions.register_forward_hook(embed),
        ]
    else:

        def with_bias(module, inputs, keywords):
            if get_ident() == thread and bias is not None:
                return inputs, {**keywords, "position_bias": bias}
            if get_ident() == thread:
                values = _bias_of(module, keys[:, None] - positions[..., None])
                return inputs, {**keywords, "position_bias": values.permute(0, 3, 1, 2)}

        handles = [_first_attention(decoder).register_forward_pre_hook(with_bias, with_kwargs=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
