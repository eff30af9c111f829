"""The properties of a model's class and config on which decoding depends."""

import inspect

from torch import nn
from transformers import GenerationMixin

from hf_efficient.cache.bookkeeping.model_key import rope_types
from hf_efficient.cache.layer_groups import HYBRID, RECURRENT
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.integrations.transformers_compat import attention_of, cache_name
from hf_efficient.integrations.transformers_loop import (
    HAS_STATES,
    LOOP_STEPS,
    PREFIX_LM,
    READS_MEDIA,
    STATES_ALONE,
    SWITCH_ROPE,
    is_collector_hook,
)
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


# Modules of the encoder-decoders whose positions are known: those of one embedding, or the bias of T5's first layer.
_ENCODER_DECODERS = {
    f"transformers.models.{name}.modeling_{name}": name
    for name in ("t5", "mt5", "bart", "mbart", "marian", "pegasus", "whisper")
}

_POSITIONS = {"wpe", "embed_positions", "position_embedding", "position_embeddings"}  # names of learned embeddings


def decoder_layers(model) -> tuple[str, nn.ModuleList]:
    """The list of the layers of `model`'s decoder, with its name in `model`.

    Raises ValueError for a model without exactly one such list.
    """
    count, decoder = model.config.get_text_config(decoder=True).num_hidden_layers, model.get_decoder()
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and any(m is module for m in decoder.children())
    ]
    if len(found) != 1:
        raise ValueError(
            f"model={type(model).__name__}: its decoder has {len(found)} lists of {count} layers, and 1 is needed"
        )
    return found[0]


def check_ragged(model, batch_size: int, argument: str) -> None:
    """Raises ValueError, naming `argument`, when `model` cannot run on sequences of unequal length."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if reads_encoder(model):
        return _check_encoder_decoder(model, batch_size, argument)
    if has_states(model):
        _check_mixers(model, argument)
    if has_states_alone(model):
        return None
    takes = inspect.signature(model.forward).parameters
    missing = [key for key in ("position_ids", cache_name()) if key not in takes]
    if missing or getattr(config, "alibi", False):
        reason = f"its forward takes no {' and no '.join(missing)}" if missing else "its ALiBi needs a 2-D mask"
        raise ValueError(f"{argument}={name}: {reason}; speculation needs a model with position_ids and {cache_name()}")
    try:
        cache = PagedCache(model.config)
    except ValueError as error:  # layers with a state that cannot be taken back
        raise ValueError(f"{argument}={name}: {error}") from None
    if cache.recurrent_layers and not has_states(model):
        raise ValueError(
            f"{argument}={name} has layers with a recurrent state, of a kind that speculation does not know: it takes "
            f"{', '.join(HAS_STATES.values())}"
        )
    if batch_size > 1 and not cache.reads_pages:
        implementation = attention_of(config)
        if implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"{argument}={name} has attn_implementation={implementation!r}: speculation on a batch of {batch_size} "
                "needs 'flash_paged', 'sdpa' or 'eager' (a batch of 1 takes any)"
            )
        if unknown := unmasked_layers(config):
            raise ValueError(
                f"{argument}={name} has {unknown} layers: speculation on a "
                f"batch of {batch_size} takes full_attention and sliding_attention layers"
            )


def reads_encoder(model) -> bool:
    """Whether the model's decoder reads an encoder's output, its own encoder's or another model's."""
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


def has_states(model) -> bool:
    """Whether some of its layers have a recurrent state, or all, in a kind of model whose states are known."""
    return has_states_alone(model) or _is_one_of(model, HAS_STATES)


def has_states_alone(model) -> bool:
    """Whether it is of a known kind of which all layers have a recurrent state."""
    return _is_one_of(model, STATES_ALONE)


def reads_media(model) -> bool:
    """Whether the model reads images or sound in its prompt, and is known to read text alone after it."""
    return _is_one_of(model, READS_MEDIA)


def sees_ahead(model) -> bool:
    """Whether tokens of its prompts attend to later ones, unless a mask hides these."""
    return getattr(decoder_config(model), "use_bidirectional_attention", None) in (True, "all")


def first_position(model) -> int:
    """What the model's `prepare_inputs_for_generation` adds to positions."""
    return int(_is_one_of(model, PREFIX_LM))


def one_mask_length(model) -> int | None:
    """The longest sequence in which one mask serves all layers of a model whose forward takes one alone; None for no
    limit."""
    config = decoder_config(model)
    is_limited = _is_one_of(model, PREFIX_LM) and attention_of(config) not in ATTENTION_NAMES
    return getattr(config, "sliding_window", None) if is_limited else None


def _is_one_of(model, kinds: dict[str, str]) -> bool:
    """kinds: module -> class."""
    return any(kinds.get(cls.__module__) == cls.__name__ for cls in type(model).__mro__)


def kind_of_encoder_decoder(model) -> str | None:
    """Of those whose positions are known, as in "bart"; None for other models."""
    return next((kind for cls in type(model).__mro__ if (kind := _ENCODER_DECODERS.get(cls.__module__))), None)


def masks_its_source(model) -> bool:
    """Whether the decoder sees no padding of its source. Whisper's sees all of it."""
    return kind_of_encoder_decoder(model) != "whisper"


def skips_padding(model) -> bool:
    """Whether the positions of an encoder-decoder's decoder count from each prompt's first token, as those of newer
    Whispers do; the others count padding, too."""
    module = _defined(model, "prepare_inputs_for_generation")[1]
    return kind_of_encoder_decoder(model) == "whisper" and (module or "").startswith("transformers.models.whisper")


def has_distance_bias(model) -> bool:
    """Whether a bias of T5's kind, by the distance of query and key, stands for positions."""
    return kind_of_encoder_decoder(model) in ("t5", "mt5")


def decoder_of(model) -> nn.Module:
    """The decoder of a model that `reads_encoder`."""
    found = model.get_decoder()
    return getattr(found, "decoder", found)  # `WhisperForCausalLM` has a module around it


def _check_encoder_decoder(model, batch_size: int, argument: str) -> None:
    """Raises ValueError, naming `argument`, for encoder-decoders whose positions `RaggedEncoderDecoder` cannot give,
    and for attentions to which it cannot give masks."""
    name = type(model).__name__
    if kind_of_encoder_decoder(model) is None:
        raise ValueError(
            f"{argument}={name} is an encoder-decoder of a kind that speculation does not know: it takes "
            f"{', '.join(_ENCODER_DECODERS.values())}"
        )
    if is_own(embedding := getattr(decoder_of(model), "embed_positions", None)):
        raise ValueError(
            f"{argument}={name}: its decoder's embed_positions, a {type(embedding).__name__}, has hooks or a forward "
            "of its own, which speculation would pass over"
        )
    implementation = attention_of(model.config)
    if batch_size > 1 and implementation not in ("sdpa", "eager", *ATTENTION_NAMES):
        raise ValueError(
            f"{argument}={name} has attn_implementation={implementation!r}: speculation on a batch of {batch_size} "
            "needs 'flash_paged', 'sdpa' or 'eager' (a batch of 1 takes any)"
        )


def is_own(module: nn.Module | None) -> bool:
    """Whether a module has the user's hooks, or a forward that is not transformers' or torch's."""
    if module is None or "_hf_hook" in vars(module):  # accelerate's
        return False
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    hooks = [getattr(hook, "func", hook) for hook in hooks if not is_collector_hook(hook)]
    is_hooked = any(not (getattr(hook, "__module__", None) or "").startswith("hf_efficient.") for hook in hooks)
    package = type(module).forward.__module__.partition(".")[0]
    return is_hooked or "forward" in vars(module) or package not in ("torch", "transformers")


def mixers_of(model) -> list[nn.Module]:
    """The modules that read and write recurrent states: those with a convolution and the number of a layer."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


def _check_mixers(model, argument: str) -> None:
    """Raises ValueError, naming `argument`, where code of the user's runs in modules that `token_by_token` runs."""
    for mixer in mixers_of(model):
        dense = (x for name, x in mixer.named_children() if name.startswith(("in_proj", "out_proj")))
        for module in (mixer, *(x for x in dense if type(x) is nn.Linear)):
            if is_own(module):
                raise ValueError(
                    f"{argument}={type(model).__name__}: layer {mixer.layer_idx} has a recurrent state, and its "
                    f"{type(module).__name__} has hooks or a forward of its own, which speculation would pass over"
                )


def unmasked_layers(config) -> str:
    """The kinds of layers for which `RaggedModel` cannot make a mask, as text; "" for none."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    unknown -= {*RECURRENT, HYBRID}  # which need none, or that of full attention
    if not unknown and getattr(config, "attention_chunk_size", None):
        return "chunked attention"
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo: a window in a buffer of its own
        return "local attention"
    return ", ".join(sorted(unknown))


def overrides_steps(model) -> str:
    """Who overrides a step of `GenerationMixin`'s decoding loop: "transformers" for a model of its own (of images,
    say), "user" for a subclass or the instance itself (as PEFT's prompts do), "" for nobody."""
    for name in LOOP_STEPS:
        if name in vars(model):
            return "user"
        cls, module = _defined(model, name)
        if cls is GenerationMixin and module == GenerationMixin.__module__:
            continue
        if not (module or "").startswith("transformers.models."):
            return "user"
        is_known = cls.__name__ in (SWITCH_ROPE.get(module), READS_MEDIA.get(module))
        # Whisper's own step gives positions where the decoder's prompts are padded, and does nothing else
        if not is_known and kind_of_encoder_decoder(model) != "whisper":
            return "transformers"
    return ""


def takes_output_apart(model) -> bool:
    """Whether transformers defines a `generate()` of the model's own, such as Whisper's, which takes apart what a
    decoding loop returns, tensor by tensor."""
    own = (cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    return any("generate" in vars(cls) for cls in own)


def decoder_config(model):
    """The config of the model's decoder; of a kind of `_ENCODER_DECODERS` the model's, which describes both parts."""
    return model.config if kind_of_encoder_decoder(model) else model.config.get_text_config(decoder=True)


def exact_length(model) -> int | None:
    """The longest sequence, in tokens with its prompt, in which a token's keys depend only on the tokens before it and
    on nothing else in the forward. None for no limit. Up to it the native loop gives what transformers' gives."""
    lengths = [_rope_length(model.config.get_text_config(decoder=True))]
    cls, module = _defined(model, "prepare_inputs_for_generation")
    if SWITCH_ROPE.get(module) == cls.__name__:
        lengths.append(getattr(model.config, "original_max_position_embeddings", None))
    return min((length for length in lengths if length is not None), default=None)


def learned_positions(model) -> int | None:
    """How many positions the decoder has learned embeddings of; None where it computes positions."""
    for name, module in decoder_of(model).named_modules():
        if name.rpartition(".")[2] in _POSITIONS and isinstance(getattr(module, "weight", None), nn.Parameter):
            return module.weight.shape[0] - getattr(module, "offset", 0)  # OPT's first rows are for padding
    return None


def _defined(model, name: str) -> tuple[type, str | None]:
    """The class that defines a step, our mixins aside, and the module of its function."""
    defines = (cls for cls in type(model).__mro__ if name in vars(cls))
    cls = next(cls for cls in defines if not cls.__module__.startswith("hf_efficient."))
    return cls, getattr(vars(cls)[name], "__module__", None)


def _rope_length(config) -> int | None:
    """The length beyond which rotary frequencies depend on the longest sequence of the forward, so that drafts,
    sequences that left the batch and prompts run apart would change them. None where they never do."""
    lengths = []
    for parameters in rope_types(config):
        kind = parameters.get("rope_type", "")
        if "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            lengths.append(parameters.get("original_max_position_embeddings") or original or 0)
    return min(lengths, default=None)
