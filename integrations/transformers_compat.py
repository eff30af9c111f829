"""Every inside of transformers that this package touches: private names, patched functions, signatures that have moved.

The registries and classes of transformers' documentation are used where they are needed. Everything else stands in
`integrations/transformers_*.py`, and each piece of it is a row of `INSIDES`. Other rooms reach such a piece through a
function of this file, which imports nothing of ours.
"""

import importlib
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True)
class Inside:
    """One inside of transformers.

    Args:
        path: module and attributes, such as "transformers.generation.utils:GenerationMixin._sample".
        used_by: our file that touches it.
        releases: the releases in which it is known to hold, as a version specifier.
    """

    path: str
    used_by: str
    releases: str = ">=5.23,<6"


_GENERATION = "transformers.generation.utils:GenerationMixin."
_MODEL = "transformers.modeling_utils:PreTrainedModel."
_CONSTRAINT = "transformers.generation.logits_process:PrefixConstrainedLogitsProcessor"
_TRANSLATORS = "transformers.generation.candidate_generator:AssistantVocabTranslatorCache"
_DEFAULTS = "transformers.generation.configuration_utils:GenerationConfig._get_default_generation_params"

INSIDES: tuple[Inside, ...] = (
    Inside("transformers.modeling_utils:PreTrainedModel._from_config", "integrations/transformers_compat.py"),
    Inside("transformers.integrations.moe:_default_apply_gate", "integrations/transformers_compat.py"),
    Inside(_GENERATION + "_sample", "integrations/transformers_generation.py"),
    Inside(_GENERATION + "_assisted_decoding", "integrations/transformers_generation.py"),
    Inside(_GENERATION + "_validate_generation_mode", "integrations/transformers_generation.py"),
    Inside(_GENERATION + "_update_model_kwargs_for_generation", "integrations/transformers_compat.py"),
    Inside(_GENERATION + "_prefill", "integrations/transformers_compat.py"),
    Inside(_GENERATION + "_supports_logits_to_keep", "integrations/transformers_compat.py"),
    Inside(_GENERATION + "_prepare_special_tokens", "integrations/transformers_compat.py"),  # _pad_token_tensor
    Inside(_GENERATION + "_prepare_cache_for_generation", "integrations/transformers_compat.py"),  # _is_user_defined
    Inside(_DEFAULTS, "integrations/transformers_compat.py"),
    Inside(_CONSTRAINT, "integrations/transformers_compat.py"),  # _prefix_allowed_tokens_fn
    Inside(_MODEL + "_can_set_attn_implementation", "integrations/transformers_compat.py"),
    Inside(_MODEL + "_check_and_adjust_attn_implementation", "integrations/transformers_compat.py"),
    Inside(_MODEL + "_keep_in_fp32_modules", "integrations/transformers_compat.py"),
    Inside(_MODEL + "_keep_in_fp32_modules_strict", "integrations/transformers_compat.py"),
    Inside(
        "transformers.configuration_utils:PreTrainedConfig._attn_implementation", "integrations/transformers_compat.py"
    ),
    Inside("transformers.utils.output_capturing:_active_collector", "integrations/transformers_compat.py"),
    Inside(_TRANSLATORS + ".get_translator", "integrations/transformers_compat.py"),
    Inside("transformers.models.phi3.modeling_phi3:Phi3ForCausalLM", "integrations/transformers_compat.py"),
    Inside("transformers.models.phimoe.modeling_phimoe:PhimoeForCausalLM", "integrations/transformers_compat.py"),
)


def find(inside: Inside) -> object:
    """What `inside` names in the installed transformers. Raises ImportError or AttributeError where it is not there."""
    module, _, attributes = inside.path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        found = getattr(found, name)
    return found


def model_from_config(kind: type, config, **options):
    """A new model of class `kind` (a `PreTrainedModel`) for `config`. options: `dtype`, for example."""
    return kind._from_config(config, **options)


def copy_attention(source, target) -> None:
    """Lets the config `target` name the same attention implementation as the config `source`."""
    target._attn_implementation = source._attn_implementation


def expert_activation(experts, projected):
    """What the activation of a fused experts module makes of the output [..., N] of its up projection."""
    return experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)


attention_of = attrgetter(
    "_attn_implementation"
)  # config -> the name of its attention; as fast as the attribute itself

# The methods of `GenerationMixin` that a step of its decoding loop consists of.
LOOP_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
# Models, by module, whose `prepare_inputs_for_generation` recomputes the whole sequence where longrope switches its
# factors, and does nothing else.
SWITCH_ROPE = {
    "transformers.models.phi3.modeling_phi3": "Phi3ForCausalLM",
    "transformers.models.phimoe.modeling_phimoe": "PhimoeForCausalLM",
}


def can_use_attention(model, name: str) -> bool:
    """Whether `model.set_attn_implementation(name)` would be accepted."""
    try:
        if not model._can_set_attn_implementation():
            return False
        model._check_and_adjust_attn_implementation(name, is_init_check=False)
    except ValueError:
        return False
    return True


def prefill(model, input_ids, generation_config, model_kwargs: dict):
    """Runs the prompt as `generate()` does, in chunks where the config asks for them. Returns the model's output."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def limits_logits(model) -> bool:
    """Whether its forward takes `logits_to_keep`."""
    return model._supports_logits_to_keep()


def pad_token_id(generation_config) -> int | None:
    """The padding token of a running `generate()` call, None for none."""
    token = generation_config._pad_token_tensor
    return None if token is None else int(token)


def is_users_cache(cache) -> bool:
    """Whether the caller of `generate()` passed this cache."""
    return getattr(cache, "_is_user_defined", False)


def default_of(generation_config, name: str):
    """The value that `generate()` takes where neither the call nor the model sets `name`."""
    return generation_config._get_default_generation_params()[name]


def allowed_tokens_fn(processor):
    """`prefix_allowed_tokens_fn` of a `PrefixConstrainedLogitsProcessor`."""
    return processor._prefix_allowed_tokens_fn


def common_tokens(target, draft, target_size: int) -> dict[int, int]:
    """Target id -> draft id of the tokens that two tokenizers have in common, as transformers' assisted generation
    compares them. target_size: the target's `vocab_size`."""
    from transformers.generation.candidate_generator import AssistantVocabTranslatorCache

    return AssistantVocabTranslatorCache.get_translator(target, draft, target_size).target_to_assistant_input_ids


def float32_modules(model) -> set[str]:
    """Patterns of the names of the modules that stay in float32."""
    return set(model._keep_in_fp32_modules or ()) | set(model._keep_in_fp32_modules_strict or ())


def collects_hidden_states() -> bool:
    """Whether a forward in the current context collects hidden states or attention weights."""
    from transformers.utils import output_capturing

    return bool(output_capturing._active_collector.get())


def is_collector_hook(hook) -> bool:
    """Whether a forward hook is transformers' collector of hidden states. It stays after the forward that asked for
    them, and does nothing in a context without a collector."""
    from transformers.utils import output_capturing

    collects = getattr(hook, "__qualname__", "").endswith("<locals>.output_capturing_hook")
    return collects and hook.__module__ == output_capturing.__name__
