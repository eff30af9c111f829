"""What the native decoding loop touches of transformers' generation: every private name of it, as functions.

Imports nothing of ours, and transformers only when a function is called. `transformers_compat.INSIDES` lists the names.
"""

# The methods of `GenerationMixin` that a step of its decoding loop consists of.
LOOP_STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
# Models, by module, whose `prepare_inputs_for_generation` recomputes the whole sequence where longrope switches its
# factors, and does nothing else.
SWITCH_ROPE = {
    "transformers.models.phi3.modeling_phi3": "Phi3ForCausalLM",
    "transformers.models.phimoe.modeling_phimoe": "PhimoeForCausalLM",
}

# Models of text beside images or sound, by module. What this file says of them holds in all supported releases: a step
# after the prompt reads token ids and positions, each one more than the last, and none of `MEDIA_INPUTS`. Where their
# `prepare_inputs_for_generation` is their own, it leaves these out and does nothing else, `PREFIX_LM` aside.
READS_MEDIA = {
    "transformers.models.gemma3.modeling_gemma3": "Gemma3ForConditionalGeneration",
    "transformers.models.llava.modeling_llava": "LlavaForConditionalGeneration",
    "transformers.models.mistral3.modeling_mistral3": "Mistral3ForConditionalGeneration",
    "transformers.models.paligemma.modeling_paligemma": "PaliGemmaForConditionalGeneration",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "transformers.models.qwen2_vl.modeling_qwen2_vl": "Qwen2VLForConditionalGeneration",
    "transformers.models.qwen3_vl.modeling_qwen3_vl": "Qwen3VLForConditionalGeneration",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "transformers.models.voxtral.modeling_voxtral": "VoxtralForConditionalGeneration",
}
# Of these, those whose `prepare_inputs_for_generation` adds 1 to positions, and whose forward takes one 4-D mask for
# all layers, those with a window too.
PREFIX_LM = {"transformers.models.paligemma.modeling_paligemma": "PaliGemmaForConditionalGeneration"}
# Models, by module, in which some layers have a recurrent state. Modules with a convolution read and write it: given
# one token, they do what a step of `generate()` does.
HAS_STATES = {
    "transformers.models.bamba.modeling_bamba": "BambaForCausalLM",
    "transformers.models.falcon_h1.modeling_falcon_h1": "FalconH1ForCausalLM",
    "transformers.models.jamba.modeling_jamba": "JambaForCausalLM",
    "transformers.models.lfm2.modeling_lfm2": "Lfm2ForCausalLM",
    "transformers.models.qwen3_5.modeling_qwen3_5": "Qwen3_5ForCausalLM",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "transformers.models.qwen3_next.modeling_qwen3_next": "Qwen3NextForCausalLM",
}
SCALES_OF_STATES = ("ssm_in_multiplier",)  # attributes of these modules by which they scale what their `in_proj` reads
# The same where all layers have one: they take no positions.
STATES_ALONE = {
    "transformers.models.falcon_mamba.modeling_falcon_mamba": "FalconMambaForCausalLM",
    "transformers.models.mamba.modeling_mamba": "MambaForCausalLM",
    "transformers.models.mamba2.modeling_mamba2": "Mamba2ForCausalLM",
}
# Arguments of `generate()` that only the forward of a prompt with images or sound reads.
MEDIA_INPUTS = (
    "pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts",
    "input_features", "token_type_ids", "mm_token_type_ids", "mm_encoder_outputs",
)  # fmt: skip
# Attributes that such a prompt leaves in the model, and steps with positions of their own do not read.
LEFT_BY_PROMPTS = ("rope_deltas",)


def can_use_attention(model, name: str) -> bool:
    """Whether `model.set_attn_implementation(name)` would be accepted."""
    try:
        if not model._can_set_attn_implementation():
            return False
        model._check_and_adjust_attn_implementation(name, is_init_check=False)
    except ValueError:
        return False
    return True


def takes_position_bias() -> bool:
    """Whether attention functions are given the bias of T5 and its like, and it is not added before them."""
    import inspect

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return "position_bias" in inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters


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
