"""Every inside of transformers that this package touches: private names, patched functions, signatures that have moved.

The registries and classes of transformers' documentation are used where they are needed. Everything else stands in
`integrations/transformers_*.py`, and each piece of it is a row of `INSIDES`. Other rooms reach such a piece through a
function of this file, which imports nothing of ours, and transformers only when a function is called.
"""

import importlib
import importlib.metadata
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable

from hf_efficient.integrations import transformers_releases
from hf_efficient.integrations.transformers_insides import OF_CONTINUOUS_BATCHING, Inside
from hf_efficient.integrations.transformers_insides import of as _of
from hf_efficient.integrations.transformers_releases import (  # noqa: F401
    cache_name,
    cache_names,
    check_paged_attention,
    without_prefix,
)


RELEASES = transformers_releases.SUPPORTED
_SUPPORTED = f"Supported: transformers {RELEASES}"


_CHOICE = "integrations/transformers_attention_choice.py"
_ATTENTION = "integrations/transformers_attention.py"
_COMPAT, _CONFIGS = "integrations/transformers_compat.py", "integrations/transformers_quantization_configs.py"
_PARALLEL = "integrations/transformers_tensor_parallel.py"
_QUANTIZER, _CONVERSIONS = "integrations/transformers_quantizer.py", "integrations/transformers_weight_conversions.py"
_BLOCKS = "integrations/transformers_block_files.py"
_GGUF, _LOOP = "integrations/transformers_gguf.py", "integrations/transformers_loop.py"
_MTP = "integrations/transformers_mtp.py"
_GENERATION, _RELEASES = "integrations/transformers_generation.py", "integrations/transformers_releases.py"

INSIDES: tuple[Inside, ...] = (
    *_of(_COMPAT, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *_of(_COMPAT, "conversion_mapping", "get_model_conversion_mapping"),
    *_of(_COMPAT, "core_model_loading", "PrefixChange", "WeightConverter", "WeightRenaming", "WeightTransform"),
    *_of(_COMPAT, "core_model_loading", "rename_source_key", "revert_weight_conversion"),
    *_of(_COMPAT, "modeling_utils", "PreTrainedModel._from_config", "PreTrainedModel._get_dtype_plan"),
    *_of(_COMPAT, "modeling_utils", "PreTrainedModel._keep_in_fp32_modules"),
    *_of(_COMPAT, "modeling_utils", "PreTrainedModel._keep_in_fp32_modules_strict"),
    *_of(_COMPAT, "modeling_utils", "PreTrainedModel._keys_to_ignore_on_load_missing"),
    *_of(_COMPAT, "modeling_utils", "PreTrainedModel._keys_to_ignore_on_save", "PreTrainedModel._no_split_modules"),
    *_of(_COMPAT, "quantizers.base", "get_keys_to_not_convert", "HfQuantizer.get_modules_to_not_convert"),
    *_of(_COMPAT, "quantizers.quantizers_utils", "should_convert_module"),
    *_of(_CONFIGS, "configuration_utils", "PreTrainedConfig.get_config_dict", "PreTrainedConfig.base_config_key"),
    Inside(
        "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
        _CONFIGS,
        parameters=("quantization_config", "quantization_config_from_args"),
    ),
    *_of(_MTP, "conversion_mapping", "get_model_conversion_mapping"),
    Inside("transformers.core_model_loading:revert_weight_conversion", _MTP, reads="_weight_conversions"),
    *_of(_MTP, "modeling_layers", "MtpModel.tie_with_main_model", "MtpModel._project_to_logits"),
    *_of(_MTP, "modeling_utils", "_get_resolved_checkpoint_files"),
    *_of(_MTP, "configuration_utils", "PreTrainedConfig._attn_implementation", "PreTrainedConfig.get_mtp_config"),
    *_of(
        _MTP, "modeling_utils", "PreTrainedModel._keys_to_ignore_on_load_unexpected", "PreTrainedModel._supports_sdpa"
    ),
    *_of("integrations/transformers_registration.py", "quantizers.auto", "LOADING_ATTRIBUTES_CONFIG_TYPES"),
    *_of(_GGUF, "integrations.gguf.utils", "is_gguf_arch_supported", since="5.17"),
    *_of(_GGUF, "modeling_gguf_pytorch_utils", "TENSOR_PROCESSORS", "TensorProcessor", "get_gguf_hf_weights_map"),
    *_of(_GGUF, "modeling_gguf_pytorch_utils", "load_gguf_checkpoint", "read_field"),
    *_of(_QUANTIZER, "quantizers.base", "HfQuantizer._process_model_before_weight_loading"),
    *_of(_QUANTIZER, "quantizers.base", "HfQuantizer._process_model_after_weight_loading", "HfQuantizer._dequantize"),
    *_of(_QUANTIZER, "quantizers.base", "HfQuantizer.get_quantize_ops", "HfQuantizer.update_weight_conversions"),
    *_of(_CONVERSIONS, "core_model_loading", "ConversionOps", "WeightConverter", "_IdentityOp"),
    Inside(
        "transformers.core_model_loading:WeightTransform.reverse_transform",
        _CONVERSIONS,
        reads="_original_source_patterns",
    ),
    Inside(
        "transformers.core_model_loading:WeightTransform.reverse_transform",
        _CONVERSIONS,
        reads="_original_target_patterns",
    ),
    Inside("transformers.core_model_loading:revert_weight_conversion", _CONVERSIONS, reads="_weight_conversions"),
    Inside(
        "transformers.core_model_loading:convert_and_load_state_dict_in_model",
        _BLOCKS,
        parameters=("model", "state_dict", "load_config", "disk_offload_index"),
    ),
    Inside(
        "transformers.core_model_loading:convert_and_load_state_dict_in_model", _BLOCKS, reads="_weight_conversions"
    ),
    Inside(
        "transformers.modeling_utils:PreTrainedModel._load_pretrained_model",
        _BLOCKS,
        parameters=("model", "state_dict", "checkpoint_files", "load_config", "expected_keys"),
    ),
    *_of(_QUANTIZER, "quantizers.base", "HfQuantizer.get_state_dict_and_metadata"),
    *_of(_RELEASES, "distributed.parallel_utils", "ALL_PARALLEL_STYLES", since="5.22"),
    *_of(_RELEASES, "distributed.parallel_utils", "_get_parameter_plan", since="5.23"),
    *_of(_RELEASES, "distributed.sharding_utils", "DtensorShardOperation"),
    *_of(_RELEASES, "distributed.tensor_parallel", "TensorParallelLayer"),
    *_of(_RELEASES, "cache_utils", "get_layer_types_and_kwargs"),
    *_of(_RELEASES, "cache_utils", "DummyLayer", since="5.23"),
    *_of(_RELEASES, "utils.import_utils", "PACKAGE_DISTRIBUTION_MAPPING", until="5.17"),
    *_of(_RELEASES, "generation.utils", "GenerationMixin._prepare_cache_for_generation"),
    Inside(
        "transformers.generation.utils:GenerationMixin._prepare_cache_for_generation",
        _RELEASES,
        reads="_is_user_defined",
        since="5.17",
    ),
    Inside("transformers.distributed.tensor_parallel", _PARALLEL, reads="_hf_quantized_needs_local_tp"),
    *_of(_ATTENTION, "modeling_flash_attention_utils", "_lazy_imports", "_flash_attention_forward"),
    *_of(_ATTENTION, "modeling_flash_attention_utils", "_pad_input", "_unpad_input"),
    *_of(_CHOICE, "modeling_utils", "PreTrainedModel._check_and_adjust_attn_implementation"),
    *_of(_CHOICE, "modeling_utils", "PreTrainedModel._can_set_attn_implementation"),
    *_of(_CHOICE, "modeling_utils", "PreTrainedModel._compatible_flash_implementations"),
    *_of(_CHOICE, "modeling_utils", "PreTrainedModel._supports_flash_attn"),
    *_of(_ATTENTION, "modeling_utils", "AttentionInterface.__getitem__"),
    *_of(_ATTENTION, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *_of(_ATTENTION, "integrations.sdpa_attention", "sdpa_attention_forward"),
    *_of(_ATTENTION, "masking_utils", "sdpa_mask", "AttentionMaskInterface.__getitem__"),
    *_of(_ATTENTION, "utils.output_capturing", "_active_collector"),
    *_of("integrations/transformers_compile.py", "modeling_utils", "PreTrainedModel.get_compiled_call"),
    *_of("integrations/transformers_compile.py", "cache_utils", "Cache.is_compileable"),
    *_of("integrations/transformers_masks.py", "masking_utils", "flash_attention_mask", "sdpa_mask"),
    *_of("integrations/transformers_masks.py", "masking_utils", "find_packed_sequence_indices"),
    *_of("integrations/transformers_masks.py", "masking_utils", "packed_sequence_mask_function"),
    *_of(
        "integrations/transformers_warnings.py",
        "modeling_utils",
        "PreTrainedModel.warn_if_padding_and_no_attention_mask",
    ),
    *_of(_GENERATION, "modeling_utils", "PreTrainedModel._tp_size"),
    *_of(_GENERATION, "generation.utils", "GenerationMixin._sample", "GenerationMixin._assisted_decoding"),
    *_of(_GENERATION, "generation.utils", "GenerationMixin._validate_generation_mode"),
    *_of(_LOOP, "generation.utils", "GenerationMixin._update_model_kwargs_for_generation", "GenerationMixin._prefill"),
    *_of(_LOOP, "generation.utils", "GenerationMixin._supports_logits_to_keep"),
    Inside("transformers.generation.utils:GenerationMixin._prepare_special_tokens", _LOOP, reads="_pad_token_tensor"),
    Inside(
        "transformers.generation.utils:GenerationMixin._prepare_cache_for_generation",
        _LOOP,
        reads="_is_user_defined",
        since="5.17",
    ),
    *_of("integrations/transformers_cache_names.py", "generation.configuration_utils", "ALL_CACHE_IMPLEMENTATIONS"),
    *_of(
        "integrations/transformers_cache_names.py", "generation.utils", "GenerationMixin._prepare_cache_for_generation"
    ),
    *_of(_LOOP, "generation.configuration_utils", "GenerationConfig._get_default_generation_params"),
    Inside(
        "transformers.generation.logits_process:PrefixConstrainedLogitsProcessor",
        _LOOP,
        reads="_prefix_allowed_tokens_fn",
    ),
    *_of(_LOOP, "modeling_utils", "PreTrainedModel._can_set_attn_implementation"),
    *_of(_LOOP, "modeling_utils", "PreTrainedModel._check_and_adjust_attn_implementation"),
    *_of(_LOOP, "utils.output_capturing", "_active_collector"),
    *_of(_LOOP, "generation.candidate_generator", "AssistantVocabTranslatorCache.get_translator"),
    *_of(_LOOP, "models.phi3.modeling_phi3", "Phi3ForCausalLM"),
    *_of(_LOOP, "models.phimoe.modeling_phimoe", "PhimoeForCausalLM"),
    *_of(_LOOP, "models.gemma3.modeling_gemma3", "Gemma3ForConditionalGeneration"),
    *_of(_LOOP, "models.llava.modeling_llava", "LlavaForConditionalGeneration"),
    *_of(_LOOP, "models.mistral3.modeling_mistral3", "Mistral3ForConditionalGeneration"),
    *_of(_LOOP, "models.paligemma.modeling_paligemma", "PaliGemmaForConditionalGeneration"),
    *_of(_LOOP, "models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    *_of(_LOOP, "models.qwen2_vl.modeling_qwen2_vl", "Qwen2VLForConditionalGeneration"),
    *_of(_LOOP, "models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLForConditionalGeneration"),
    *_of(_LOOP, "models.qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    *_of(_LOOP, "models.voxtral.modeling_voxtral", "VoxtralForConditionalGeneration"),
    *_of(_LOOP, "models.bamba.modeling_bamba", "BambaForCausalLM"),
    *_of(_LOOP, "models.falcon_h1.modeling_falcon_h1", "FalconH1ForCausalLM"),
    *_of(_LOOP, "models.falcon_mamba.modeling_falcon_mamba", "FalconMambaForCausalLM"),
    *_of(_LOOP, "models.jamba.modeling_jamba", "JambaForCausalLM"),
    *_of(_LOOP, "models.lfm2.modeling_lfm2", "Lfm2ForCausalLM"),
    *_of(_LOOP, "models.mamba.modeling_mamba", "MambaForCausalLM"),
    *_of(_LOOP, "models.mamba2.modeling_mamba2", "Mamba2ForCausalLM"),
    *_of(_LOOP, "models.qwen3_5.modeling_qwen3_5", "Qwen3_5ForCausalLM"),
    *_of(_LOOP, "models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
    *_of(_LOOP, "models.qwen3_next.modeling_qwen3_next", "Qwen3NextForCausalLM"),
    *_of(_COMPAT, "configuration_utils", "PreTrainedConfig._experts_implementation"),
    *_of(_COMPAT, "integrations.moe", "_default_apply_gate", "_grouped_linear"),
    *_of(_RELEASES, "integrations.flash_paged", "paged_attention_forward", until="5.19"),
    *OF_CONTINUOUS_BATCHING,
)


def find(inside: Inside) -> object:
    """What `inside` names in the installed transformers.

    Raises:
        ImportError, AttributeError: it is not there, or not as it is used.
    """
    module, _, attributes = inside.path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        found = getattr(found, name)
    if inside.parameters is not None:
        if not callable(found) or tuple(inspect.signature(found).parameters) != inside.parameters:
            raise AttributeError(f"{inside.path} does not take {inside.parameters}")
    if inside.reads is not None and inside.reads not in inspect.getsource(found):
        raise AttributeError(f"{inside.path} does not read {inside.reads}")
    return found


def require(used_by: str) -> None:
    """Looks for the insides that our file `used_by` touches.

    Raises:
        ImportError: transformers has one of them no longer. Names it and the supported releases.
    """
    for inside in INSIDES:
        if inside.used_by == used_by and inside.is_expected:
            try:
                find(inside)
            except (ImportError, AttributeError) as error:
                path = inside.path.removeprefix("transformers.").replace(":", ".")
                path += f"({', '.join(inside.parameters)})" if inside.parameters else ""
                raise ImportError(
                    f"hf_efficient needs {path}, which transformers {_version()} does not have. {_SUPPORTED}."
                ) from error


def check_release() -> None:
    """Raises ImportError, naming the supported releases, where the installed transformers is none of them."""
    try:
        release = transformers_releases.numbers(_version())
    except importlib.metadata.PackageNotFoundError:  # none is installed, or it runs from its sources
        return
    if not transformers_releases.OLDEST <= release < transformers_releases.BELOW:
        raise ImportError(f"hf_efficient does not work with transformers {_version()}. {_SUPPORTED}.")


_version = transformers_releases.version


def attention_of(config) -> str | None:
    """The name of the attention of models of `config`. A function: torch.compile cannot trace an attrgetter."""
    return config._attn_implementation


def set_attention(config, name: str | None) -> None:
    """Makes models of `config` use the attention implementation called `name`, unchecked, where they have attention."""
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = name


def block_classes(model) -> set[str]:
    """Names of the classes whose modules stay on one device: the decoder layers."""
    return set(model._no_split_modules or ())


def model_from_config(kind: type, config, **options):
    """A model of class `kind` (a `PreTrainedModel`) with initial weights. options: `dtype` and others of
    `from_config`."""
    return kind._from_config(config, **options)


def float32_modules(model) -> set[str]:
    """Patterns of the names of the modules that stay in float32 when the model is loaded in 16 bits."""
    return set(model._keep_in_fp32_modules or ()) | set(model._keep_in_fp32_modules_strict or ())


def kept_parameters(model) -> set[str]:
    """Names of the parameters that transformers keeps in more precision than the others.

    They are those that `float32_modules` names (in whatever dtype the model is loaded: transformers' own quantizers
    take none of them), and those declared in another dtype than most of the innermost model that holds them.
    """
    from transformers import PreTrainedModel

    flagged = float32_modules(model)
    usual = {}  # prefix of the names in a model -> the dtype of most of its parameters; outer models come first
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            counts = Counter(p.dtype for p in part.parameters() if p.is_floating_point())
            usual[f"{name}." if name else ""] = counts.most_common(1)[0][0] if counts else None
    kept = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = next(dtype for prefix, dtype in reversed(usual.items()) if name.startswith(prefix))
        if parameter.dtype != own or any(_matches(pattern, name) for pattern in flagged):
            kept.add(name)
    return kept


def loaded_dtype(model, name: str, dtype):
    """The dtype that `from_pretrained` gives the parameter called `name`, which is declared as `dtype`."""
    plan = model._get_dtype_plan(model.dtype)
    return next((kept for pattern, kept in plan.items() if _matches(pattern, name)), dtype)


def _matches(pattern: str, name: str) -> bool:
    """As transformers reads patterns of this kind."""
    return re.search(pattern.replace("*", ".*"), name) is not None


def kept_by_default(model) -> set[str]:
    """Names of the modules that transformers' quantizers leave as they are: the output embedding and what is tied."""
    from transformers.quantizers.base import get_keys_to_not_convert

    return {key.removesuffix(".weight").removesuffix(".bias") for key in get_keys_to_not_convert(model)}


def quantized_linears(model, excluded: list[str] | None) -> set[str]:
    """Names of the `nn.Linear` modules that a quantizer of transformers takes where `excluded` is the
    `modules_to_not_convert` of its config."""
    from torch import nn
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(model, excluded, model._keep_in_fp32_modules)
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name for name in linears if should_convert_module(name, kept)}


def optional_names(model) -> list[str]:
    """Regular expressions of the names of parameters that a checkpoint of the model may lack."""
    return [*(model._keys_to_ignore_on_load_missing or ()), *(model._keys_to_ignore_on_save or ())]


def conversions_of(model) -> list:
    """What `from_pretrained` does to the names and tensors of a checkpoint of the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def key_renamer(model, conversions: Iterable, known: dict, joins: bool = True) -> Callable[[str], list[str]]:
    """A function: key in a checkpoint -> names in the model, several of a tensor that is split.

    Args:
        conversions: `conversions_of(model)`.
        known: has the names in the model as keys.
        joins: whether a key whose tensor is joined with others, or split, gets the names of what it becomes.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions, base = list(conversions), model.base_model_prefix
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def rename(key: str) -> list[str]:
        name, _ = rename_source_key(key, renamings, [], base, known)
        if joins and name not in known:
            first, pattern = rename_source_key(key, renamings, converters, base, known)
            by = next((c.target_patterns for c in converters if pattern in c.source_patterns), [])
            return [first.replace(by[0], target, 1) for target in by if by[0] in first] or [first]
        return [name]

    return rename


def round_trip(model) -> Callable[[str], str]:
    """A function: name in the model -> the name that it has when the model is saved and loaded again."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming) and not isinstance(c, PrefixChange)]
    back = [c.reverse_transform() for c in reversed(renamings)]
    return lambda name: rename_source_key(rename_source_key(name, back, [])[0], renamings, [])[0]


def as_saved(model, tensors: dict) -> dict:
    """Tensors by the model's names -> by the names of its checkpoints; fused ones come apart."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def copy_attention(source, target) -> None:
    """Lets the config `target` name the same attention implementation as the config `source`."""
    target._attn_implementation = source._attn_implementation


def expert_activation(experts, projected):
    """What the activation of a fused experts module makes of the output [..., N] of its up projection."""
    return experts._apply_gate(projected) if experts.has_gate else experts.act_fn(projected)


def experts_implementation(experts) -> str | None:
    """The name of the implementation of a fused experts module."""
    return experts.config._experts_implementation


def grouped_linear(*arguments):
    """transformers' product of (rows [S, K], weights [E, N, K], offsets int32 [E], bias, whether weights are [E, K,
    N])."""
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(*arguments)
