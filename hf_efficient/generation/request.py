"""One call of `generate()`, from its arguments to the loop."""

import functools
from dataclasses import dataclass, field, replace

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.model_traits import reads_media, takes_output_apart
from hf_efficient.generation.sequences import Sequences, is_left_padded, longest
from hf_efficient.generation.source import Source
from hf_efficient.generation.speculation.options import Speculation, chosen
from hf_efficient.generation.speculation.proposal import MAX_NODES
from hf_efficient.integrations.transformers_compat import cache_name
from hf_efficient.integrations.transformers_loop import MEDIA_INPUTS, pad_token_id


@dataclass
class GenerationRequest:
    """What `generate()` hands to a decoding method, and what the caller drafts with.

    Args:
        model: the target.
        input_ids: int64 [batch, prompt length].
        logits_processor, stopping_criteria, generation_config, synced_gpus, streamer: as `generate()` prepared them.
        model_kwargs: arguments of the prompt's forward, such as `attention_mask` and the cache.
        draft: a draft model, a `Drafter`, or a `Speculation` around one; None for what the config says, or nothing.
        tokenizers: the target's and the draft model's, None where not given.
        inputs: what the encoder of an encoder-decoder read, None where not known.
        replaces_sample: the call stands for transformers' `_sample`, without a drafter, and returns what that returns.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool = False
    streamer: object | None = None
    draft: object | None = None
    tokenizers: tuple = (None, None)
    model_kwargs: dict = field(default_factory=dict)
    inputs: torch.Tensor | None = None
    replaces_sample: bool = False

    @classmethod
    def of(
        cls,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        *,
        draft=None,
        tokenizers=(None, None),
        inputs=None,
        replaces_sample=False,
        **model_kwargs,
    ) -> "GenerationRequest":
        """From the arguments of one of transformers' decoding methods."""
        run = logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        return cls(model, input_ids, *run, draft, tokenizers, model_kwargs, inputs, replaces_sample)

    @functools.cached_property
    def speculation(self) -> Speculation | None:
        """What to draft with. Raises ValueError where the caller named two things."""
        return chosen(self.draft, self.generation_config, self.model)

    @functools.cached_property
    def drafter(self) -> Drafter | None:
        return None if self.speculation is None else self.speculation.drafter(self.tokenizers)

    def without_drafter(self) -> "GenerationRequest":
        """The same request, decoded token by token."""
        other = replace(self)
        other.__dict__.update(speculation=None, drafter=None)
        return other

    @property
    def most_tokens(self) -> int:
        """Of a sequence in the cache, with those of a draft."""
        return self.max_length + MAX_NODES + 1

    @property
    def batch_size(self) -> int:
        return len(self.input_ids)

    @property
    def max_length(self) -> int:
        """Tokens that a sequence can reach, its prompt among them."""
        return longest(self.stopping_criteria, self.input_ids.shape[1])

    @property
    def cache(self):
        """The cache that the caller or `generate()` made, or None."""
        return self.model_kwargs.get(self.cache_name)

    @property
    def cache_name(self) -> str:
        """What arguments and outputs call the cache."""
        return cache_name()

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """Of the tokens that grow: the decoder's."""
        is_decoders = self.model.config.is_encoder_decoder
        return self.model_kwargs.get("decoder_attention_mask" if is_decoders else "attention_mask")

    @functools.cached_property
    def is_left_padded(self) -> bool:
        return is_left_padded(self.input_ids, {**self.model_kwargs, "attention_mask": self.attention_mask})

    @property
    def unknown_inputs(self) -> list[str]:
        """Inputs of a model of images or sound of which it is not known that only its prompt reads them."""
        known = {*MEDIA_INPUTS, "attention_mask", "position_ids", "use_cache", "logits_to_keep", self.cache_name}
        given = [name for name, value in self.model_kwargs.items() if value is not None and name not in known]
        return given if reads_media(self.model) else []

    @property
    def returns_dict(self) -> bool:
        return self.generation_config.return_dict_in_generate

    @property
    def is_taken_apart(self) -> bool:
        """Whether a `generate()` of the model's own takes apart what is returned, which then has no statistics."""
        return takes_output_apart(self.model) and not self.replaces_sample

    @functools.cached_property
    def source(self) -> Source | None:
        """What the decoder of an encoder-decoder reads; None for other models."""
        outputs = self.model_kwargs.get("encoder_outputs")
        if not self.model.config.is_encoder_decoder or outputs is None:
            return None
        inputs = self.inputs
        if inputs is not None and len(inputs) < self.batch_size:  # of `num_return_sequences` for each
            inputs = inputs.repeat_interleave(self.batch_size // len(inputs), 0)
        return Source(self.model, outputs, self.model_kwargs.get("attention_mask"), inputs)

    def sequences(self) -> Sequences:
        """The prompts, ready to grow."""
        config = self.generation_config
        sequences = Sequences(
            self.input_ids,
            self.attention_mask,
            pad_token_id(config),
            self.logits_processor,
            self.stopping_criteria,
            keep_scores=bool(self.returns_dict and config.output_scores),
            keep_logits=bool(self.returns_dict and config.output_logits),
            pads_finished=self.replaces_sample and self.returns_dict,
            generation_config=config,
        )
        sequences.source = self.source
        return sequences
