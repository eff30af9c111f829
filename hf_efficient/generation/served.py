"""Decides which `generate()` calls the native loop runs, and which are left to transformers or refused."""

from collections.abc import Callable

from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel

from hf_efficient.generation import model_state
from hf_efficient.generation.encoder_reading import kind_of_cache, source_lengths, unknown_arguments
from hf_efficient.generation.model_traits import (
    check_ragged,
    decoder_config,
    exact_length,
    has_states,
    has_states_alone,
    one_mask_length,
    overrides_steps,
    reads_encoder,
    reads_media,
)
from hf_efficient.generation.processor_kinds import STATEFUL
from hf_efficient.generation.replay.captured_forward import DTYPES, MAX_TOKENS, is_being_watched, why_not_captured
from hf_efficient.generation.request import GenerationRequest
from hf_efficient.integrations.transformers_compat import attention_of
from hf_efficient.integrations.transformers_loop import is_users_cache
from hf_efficient.integrations.transformers_releases import states_name


_CACHES = (None, "dynamic")  # values of cache_implementation that a PagedCache can stand for


def serves(request: GenerationRequest) -> bool:
    """Whether the native loop replaces transformers' in a call without a drafter: on CPUs and CUDA devices, for models
    whose forwards can be captured, where the output is the same.

    Under `return_dict_in_generate` the output has the same scores, logits, keys and values; those of attention weights
    and hidden states, which captured forwards do not keep, are left to transformers.
    """
    model, config, cache = request.model, request.generation_config, request.cache
    if (
        model.device.type not in DTYPES
        or request.synced_gpus
        or config.is_assistant
        or (request.returns_dict and (config.output_attentions or config.output_hidden_states))
        or (request.returns_dict and type(cache) is not DynamicCache)
        or is_being_watched()
        or not config.use_cache
        or config.cache_implementation not in _CACHES
        or (cache is not None and (is_users_cache(cache) or cache.get_seq_length()))
        or not writes_text_alone(model)
        or request.unknown_inputs
        or request.input_ids.dim() != 2
        or 0 in request.input_ids.shape
        or not request.is_left_padded
        or any(isinstance(processor, STATEFUL) for processor in request.logits_processor)
    ):
        return False
    if reads_encoder(model) and raises(check_ragged, model, request.batch_size, "model"):
        return False
    if reads_encoder(model) and (raises(check_decoder_inputs, request) or not reads_source_in_place(request)):
        return False
    version = model_state.current(model)
    return version.is_capturable and (version.exact_length is None or request.max_length <= version.exact_length)


def why_not(model) -> str | None:
    """Why plain `generate()` of `model` never runs the native loop; None where it does for the calls of `serves`."""
    if not isinstance(model, GenerationMixin):
        return "the model writes no text"
    try:
        check_ragged(model, 1, "model")
    except ValueError as error:
        return str(error)
    if reads_encoder(model) and model.device.type != "cpu":
        return "the native loop runs encoder-decoders on CPUs alone"
    if not writes_text_alone(model):
        return "the native loop takes text decoders, and this model reads something else, too"
    if (reason := why_not_captured(model)) is not None:
        return reason
    if has_states(model):
        return "layers with a recurrent state are not captured"
    if overrides_steps(model):
        return "the model overrides a step of transformers' decoding loop"
    if not model_state.current(model).is_capturable:
        implementation = attention_of(decoder_config(model))
        return f"attention of this model does not read pages with attn_implementation={implementation!r}"
    return None


def writes_text_alone(model) -> bool:
    """Whether steps after the prompt are known to read text alone, or beside it an encoder's output."""
    return decoder_config(model) is model.config or reads_media(model)


def reads_source_in_place(request: GenerationRequest) -> bool:
    """Whether captured forwards of so many sequences could read what the encoder of an encoder-decoder made: see
    `source_lengths`."""
    if request.source is None or request.batch_size > MAX_TOKENS:
        return False
    return source_lengths(request.model, request.source) is not None


def refuses(request: GenerationRequest) -> bool:
    """Whether speculation refuses a call that transformers' own assisted generation takes."""
    if not is_transformers_draft(request.draft):
        return False
    models = [(request.model, "model")] + ([] if request.draft is None else [(request.draft, "assistant_model")])
    return (
        any(isinstance(processor, STATEFUL) for processor in request.logits_processor)
        or raises(check_options, request)
        or raises(callers_cache, request)
        or (request.draft is not None and raises(getattr, request, "drafter"))  # its settings
        or any(raises(check_ragged, model, request.batch_size, name) for model, name in models)
    )


def is_transformers_draft(draft) -> bool:
    """Whether transformers' own assisted generation can use `draft`: a model, or None."""
    return draft is None or isinstance(draft, PreTrainedModel)


def raises(check: Callable, *arguments) -> bool:
    """Whether `check` raises ValueError."""
    try:
        check(*arguments)
    except ValueError:
        return True
    return False


def check(request: GenerationRequest) -> Cache | None:
    """Raises ValueError, before any forward, for what speculation cannot do. Returns the caller's cache, if any."""
    check_options(request)
    speculation = request.speculation
    check_ragged(request.model, request.batch_size, "model")
    cache = callers_cache(request)
    if speculation is not None:
        if speculation.model is not None:
            check_ragged(speculation.model, request.batch_size, "assistant_model")
        request.drafter.check(request.model)
        request.drafter.check_max_tokens()
    return cache


def check_mode(generation_config) -> None:
    """Raises ValueError for other decoding methods than greedy search and sampling."""
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={generation_config.num_beams}: speculation is greedy or sampled decoding, num_beams=1. Leave "
            "out the assistant model and prompt_lookup_num_tokens to use beams"
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"assistant_ensemble_weight={generation_config.assistant_ensemble_weight}: speculation here is lossless; "
            "only None is allowed"
        )


def check_options(request: GenerationRequest) -> None:
    """Raises ValueError for options, models and inputs that speculation does not take, caches and drafts aside."""
    model, input_ids, config = request.model, request.input_ids, request.generation_config
    check_mode(config)
    name, length, max_length = type(model).__name__, exact_length(model), request.max_length
    if overrides_steps(model) == "user":
        raise ValueError(
            f"model={name}: it overrides a step of transformers' decoding loop (prepare_inputs_for_generation, for "
            "one), and speculation runs a loop of its own. Leave out the assistant model and prompt_lookup_num_tokens"
        )
    if length is not None and max_length > length:
        raise ValueError(
            f"max_length={max_length}: beyond {length} tokens the rotary embedding of {name} follows from the longest "
            "row of a forward, which drafts would change. Leave out the assistant model and prompt_lookup_num_tokens, "
            f"or generate at most {length} tokens, the prompt among them"
        )
    if (window := one_mask_length(model)) is not None and max_length > window:
        raise ValueError(
            f"max_length={max_length}: beyond sliding_window={window} tokens the layers of {name} need two masks, and "
            "its forward takes one. Leave out the assistant model and prompt_lookup_num_tokens, or generate at most "
            f"{window} tokens, the prompt among them"
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False: speculation rewinds a cache, use_cache=True is needed")
    if config.cache_implementation not in _CACHES and not isinstance(request.cache, kind_of_cache(model)):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r}: speculation runs on a PagedCache; leave "
            'cache_implementation out, set it to "paged" or "paged_int8" in model.generation_config, or pass '
            "past_key_values=PagedCache(model.config)"
        )
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option) and config.return_dict_in_generate:
            raise ValueError(f"{option}=True is not available under speculation; output_scores and output_logits are")
    if request.synced_gpus:
        raise ValueError(
            "synced_gpus=True (FSDP, ZeRO-3): speculation takes a different number of forwards on each rank"
        )
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)}: speculation drafts from token ids [batch >= 1, length >= 1],"
            " and cannot start from inputs_embeds alone"
        )
    if reads_encoder(model):
        check_decoder_inputs(request)


def check_decoder_inputs(request: GenerationRequest) -> None:
    """Raises ValueError for inputs of an encoder-decoder's decoder that speculation does not take."""
    name = type(request.model).__name__
    if not request.is_left_padded:
        raise ValueError(
            "decoder_attention_mask: the decoder's prompts are padded elsewhere than on the left. Pad them there, or "
            "give one at a time"
        )
    if unknown := unknown_arguments(request.model, request.model_kwargs):
        raise ValueError(
            f"{', '.join(unknown)}: speculation does not pass this on to the decoder of {name}; it takes "
            "encoder_outputs and attention_mask"
        )


def callers_cache(request: GenerationRequest) -> Cache | None:
    """The caller's cache of pages; None where there is no cache, or the empty one that `generate()` made.

    Raises ValueError for a cache of another kind.
    """
    cache, kind = request.cache, kind_of_cache(request.model)
    if has_states_alone(request.model):
        if is_users_cache(request.model_kwargs.get(name := states_name())):
            raise ValueError(f"{name}: speculation begins with the prompt; leave it out")
        return None
    if isinstance(cache, kind):
        return cache
    if cache is not None and (is_users_cache(cache) or cache.get_seq_length() > 0):
        article = "an" if reads_encoder(request.model) else "a"
        raise ValueError(
            f"past_key_values={type(cache).__name__}: speculation runs on {article} {kind.__name__}; leave "
            f"past_key_values out, or pass past_key_values={kind.__name__}(model.config), filled or not"
        )
    return None
