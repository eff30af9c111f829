"""What has moved between the releases of transformers that this package supports, one function for each of them.

Each says the release in which the name or signature became what our code uses, and gives its like in older ones. What
an older release cannot do is refused by `needs`, which names the first that can. Imports nothing of ours, and
transformers only when a function is called.
"""

import functools
import importlib.metadata
import re


OLDEST, BELOW = (5, 16, 1), (5, 25)  # of the supported releases; setup.cfg requires the same
SUPPORTED = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BELOW))}"


def version() -> str:
    """The installed transformers'. Raises PackageNotFoundError where none is, or where it runs from its sources."""
    return importlib.metadata.version("transformers")


@functools.cache
def has(release: str) -> bool:
    """Whether the installed transformers is `release`, such as "5.21", or a later one."""
    return numbers(version()) >= numbers(release)


def numbers(release: str) -> tuple[int, ...]:
    """The first three numbers of a release: "5.24.0.dev0" is (5, 24, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


def needs(release: str, what: str) -> None:
    """Raises ValueError, naming both releases, where the installed transformers is older than `release`."""
    if not has(release):
        raise ValueError(f"{what} needs transformers {release} or later; installed is {version()}")


def cache_name() -> str:
    """What models, `generate()` and their outputs call the cache: "cache" as of 5.24, "past_key_values" before."""
    return "cache" if has("5.24") else cache_names()[0]


def states_name() -> str:
    """What models of which all layers have a recurrent state call their cache: "cache_params" before 5.24."""
    return cache_name() if has("5.24") else "cache_params"


def cache_names() -> tuple[str, ...]:
    """By what names a caller of a model may give the cache: since 5.24 the old one is deprecated."""
    return ("past_key_values", "cache") if has("5.24") else ("past_key_values",)


def layer_types_and_kwargs(decoder) -> tuple[list[str], list[dict]]:
    """The type of each layer that a cache of the model has, and the arguments of its cache layer.

    In 5.18 the arguments became one dict a layer. In 5.23 layers that store nothing became "dummy" ones: before, a
    cache has no layer for those that share keys and values of another.
    """
    from transformers.cache_utils import get_layer_types_and_kwargs

    types, kwargs = get_layer_types_and_kwargs(decoder)
    return types, [kwargs] * len(types) if isinstance(kwargs, dict) else kwargs


def dummy_layer():
    """The cache layer of a layer of type "dummy". Both came with 5.23."""
    from transformers.cache_utils import DummyLayer

    return DummyLayer()


def dequantized_gguf() -> dict:
    """Arguments of `from_pretrained(..., gguf_file=...)` for dense weights. `GgufConfig` came with 5.17; before, they
    always are."""
    if not has("5.17"):
        return {}
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}


def name_gguf() -> None:
    """Has transformers find the version of the package `gguf` on Python 3.10, as it does as of 5.17. Before, it read
    "N/A" there, because the wheel has no `top_level.txt`, and no GGUF could be loaded. Idempotent."""
    if has("5.17"):
        return
    from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING

    PACKAGE_DISTRIBUTION_MAPPING.setdefault("gguf", ["gguf"])


def quantizer_base() -> type:
    """`HfQuantizer`, whose `update_weight_conversions(conversions, model)` is given the model as of 5.21.

    In 5.21 `update_parallel_plan` took the place of `update_tp_plan` and `update_ep_plan`, too; see
    `transformers_tensor_parallel`.
    """
    from transformers.quantizers import HfQuantizer

    if has("5.21"):
        return HfQuantizer

    class RemembersModel(HfQuantizer):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            if (update := vars(cls).get("update_weight_conversions")) is not None:
                cls.update_weight_conversions = _with_model(update)

        def preprocess_model(self, model, *args, **kwargs):
            self._being_loaded = model
            return super().preprocess_model(model, *args, **kwargs)

    return RemembersModel


def _with_model(update):
    @functools.wraps(update)
    def update_weight_conversions(self, conversions, model=None):
        return update(self, conversions, vars(self).pop("_being_loaded") if model is None else model)

    return update_weight_conversions


def longest_first(patterns: str | list[str]) -> str | list[str]:
    """Patterns of a converter, of which the first that matches is taken. As of 5.21 transformers puts them in this
    order."""
    return patterns if isinstance(patterns, str) else sorted(patterns, key=len, reverse=True)


def keep_dtypes(model, dtypes: dict[str, str]) -> None:
    """Declares parameters of `model`, which is on the meta device, with the dtypes that their tensors have in the
    checkpoint, so that these are not cast. As of 5.21 the hook `get_new_dtype` says that.

    dtypes: full name -> dtype in safetensors' words.
    """
    if has("5.21"):
        return
    import torch

    floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for name in dtypes:
        path, _, leaf = name.rpartition(".")
        parameters = model.get_submodule(path)._parameters
        if (dtype := floats.get(dtypes[name])) is not None:
            parameters[leaf] = torch.nn.Parameter(parameters[leaf].to(dtype), requires_grad=False)


def uncast(tensors: dict, dtypes: dict) -> dict:
    """Gives float8 codes among `tensors` the dtype that `dtypes` says, by the same names: before 5.21 a tensor whose
    key in the checkpoint is the name of a parameter comes in that parameter's dtype, which holds the same values."""
    return {
        name: tensor.to(dtypes[name]) if "float8" in str(dtypes.get(name)) and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def post_expert_norm(experts):
    """The norm behind each expert of a fused experts module, None for none. It came with 5.20."""
    return experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None


def parallel_utils():
    """(ALL_PARALLEL_STYLES, _get_parameter_plan, DtensorShardOperation, TensorParallelLayer) of tensor parallelism.

    None, all of them, before 5.23, which brought the two first to one place: until 5.20 a quantizer that changes the
    plan knows the config of a model and not the model, and in 5.21 and 5.22 experts that are cut compute wrong numbers.
    """
    if not has("5.23"):
        return None, None, None, object
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, _get_parameter_plan
    from transformers.distributed.sharding_utils import DtensorShardOperation
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    return ALL_PARALLEL_STYLES, _get_parameter_plan, DtensorShardOperation, TensorParallelLayer


def mark_users_caches() -> None:
    """Has `generate()` mark the cache that its caller passed, as transformers does as of 5.17. Idempotent."""
    from transformers import GenerationMixin

    original = GenerationMixin._prepare_cache_for_generation
    if has("5.17") or hasattr(original, "_hf_efficient"):
        return

    @functools.wraps(original)
    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if (cache := model_kwargs.get(cache_name())) is not None:
            cache._is_user_defined = True
        return original(self, generation_config, model_kwargs, *args, **kwargs)

    _prepare_cache_for_generation._hf_efficient = True
    GenerationMixin._prepare_cache_for_generation = _prepare_cache_for_generation


def without_prefix(attention: str | None) -> str | None:
    """The name of an attention implementation without the "paged|" that continuous batching puts before it until
    5.19."""
    return attention and attention.removeprefix("paged|")


def register_paged_attention(names: tuple[str, ...]) -> None:
    """Registers what continuous batching calls for the flash attention functions called `names`, before 5.19: then
    transformers' own function calls them. As of 5.19 there is one function for both."""
    from transformers import AttentionInterface
    from transformers.integrations.flash_paged import paged_attention_forward

    for name in names:
        AttentionInterface.register(f"paged|{name}", paged_attention_forward)


def check_paged_attention(config) -> None:
    """Raises ValueError for a model whose windows or softcap transformers' function drops before 5.19."""
    config = config.get_text_config(decoder=True)
    for option in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, option, None):
            needs("5.19", f"{option}={getattr(config, option)} in continuous batching under flash_paged")
