"""A model without weights: built from its config on the meta device, compressed as on loading, and its sizes."""

from collections.abc import Callable, Iterable

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoHfQuantizer

from hf_efficient.calibration import own_text
from hf_efficient.configs import CompressionConfig
from hf_efficient.integrations.transformers_compat import attention_of, loaded_dtype, model_from_config, set_attention
from hf_efficient.integrations.transformers_registration import register
from hf_efficient.layers import CompressedModule
from hf_efficient.planning import weight_bytes
from hf_efficient.planning.model_trace import ATTENTION, Trace
from hf_efficient.targets import patterns


class MetaModel:
    """The model of a config on the meta device, and the bytes of its parts.

    dtype: of the weights that are not compressed. quantization: None for the model as it is. check_names: raise
    ValueError for patterns of `quantization` that match no module. kind: of the device, as in
    `weight_bytes.bytes_by_module`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        quantization: CompressionConfig | None,
        check_names: bool,
        kind: str,
    ):
        self.config, self.dtype, self.on_cpu = config, dtype, kind == "cpu"
        self.module = build(config, dtype, ATTENTION)
        if quantization is not None:
            quantization = quantization.settled(own_text.reaches_all(self.module))
            compress(self.module, quantization, check_names)
        self.quantization = quantization
        self.bytes = weight_bytes.bytes_by_module(self.module, kind)
        self.weight_bytes = sum({k: v for own in self.bytes.values() for k, v in own.items()}.values())
        self.checkpoint_bytes = weight_bytes.checkpoint_bytes(self.module)
        self.parameters = _count(self.module.modules())

    @property
    def rounded_dtype(self) -> str | None:
        """The 8-bit dtype that inputs of the compressed layers are rounded to, if they are."""
        if self.quantization is None:
            return None
        if self.quantization.name == "efficient_w8a8":
            return self.quantization.dtype
        if self.quantization.name == "efficient_bitnet":
            return "int8"
        return "int8" if self.on_cpu and getattr(self.quantization, "int8_on_cpu", False) is True else None

    def bytes_read(self, trace: Trace) -> float:
        """Bytes of weights that the forward of `trace` reads.

        Of E experts, each of T tokens chooses k: a share of 1 - (1 - k / E)^T is expected to be read.
        """
        read: dict[int, float] = {}
        for module, experts in trace.read.items():
            share = 1.0
            if experts is not None:
                chosen, number, tokens = experts
                share = 1 - (1 - chosen / number) ** tokens
            read |= {storage: share * size for storage, size in self.bytes[module].items()}
        return sum(read.values())

    def active_parameters(self, trace: Trace) -> int:
        """Parameters that each token is multiplied with: of experts the chosen ones."""

        def share(module):
            experts = trace.read[module]
            return 1.0 if experts is None else experts[0] / experts[1]

        return _count(trace.read, share)


def _count(modules: Iterable[nn.Module], share: Callable[[nn.Module], float] = lambda module: 1.0) -> int:
    """Parameters of `modules`, each module weighted with `share`; tied ones count once."""
    seen, total = set(), 0.0
    for module in modules:
        storages = {p.untyped_storage()._cdata for p in module.parameters(recurse=False)}
        if storages and not storages <= seen:
            total += share(module) * _own_parameters(module)
        seen |= storages
    return round(total)


def _own_parameters(module: nn.Module) -> int:
    """The number of the module's own parameters before compression."""
    if not isinstance(module, CompressedModule):
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))
    weights = module.compressed_weights()
    packed = {name for weight in weights for name in (weight.prefix[:-1], *weight.names().values())} | {"weight"}
    rest = [parameter for name, parameter in module.named_parameters(recurse=False) if name not in packed]
    return sum((w.experts or 1) * w.out_features * w.in_features for w in weights) + sum(p.numel() for p in rest)


def build(config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    """The model that `from_pretrained` would make, on the meta device. Raises ValueError where transformers cannot.

    attention: of the models that have one class for all implementations; others (Falcon, GPT-J) keep their own."""
    model_class = _class_of(config)
    options, own_attention = {} if attention is None else {"attn_implementation": attention}, attention_of(config)
    try:
        with torch.device("meta"):
            try:
                model = model_from_config(model_class, config, dtype=dtype, **options)
            except KeyError:
                if attention is None:
                    raise
                set_attention(config, own_attention)
                model = model_from_config(model_class, config, dtype=dtype)
    except Exception as error:
        raise ValueError(f"transformers cannot build a {model_class.__name__} of this config: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(loaded_dtype(model, name, parameter.dtype))
    return model


def _class_of(config: PreTrainedConfig) -> type:
    """The class in `architectures`, else that of the first task which transformers maps the config to."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    tasks = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MASKED_LM")
    if config.is_encoder_decoder:
        tasks = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", *tasks)
    for name in (*(f"MODEL_FOR_{task}_MAPPING" for task in tasks), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, name)
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no model of a {type(config).__name__}")


def compress(model: nn.Module, quantization: CompressionConfig, check_names: bool) -> None:
    """Swaps the modules that `quantization` compresses, as for a checkpoint that was saved with it.

    Methods that need data are swapped too; what they only learn from data (overrides of `mixed_precision`, scales of
    inputs) is missing. check_names: raise ValueError for patterns that match no module.
    """
    if check_names:
        patterns.check_names(quantization, model)
    register()
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    quantizer.preprocess_model(model, dtype=model.dtype, checkpoint_files=None, device_map=None)
    if check_names:
        compressed = {name for name, module in model.named_modules() if isinstance(module, CompressedModule)}
        patterns.check_overrides(quantization, model, compressed)
