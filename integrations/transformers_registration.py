"""Our configs and quantizer, entered in transformers' registries."""

from transformers.quantizers import auto

from hf_efficient.configs import BitNetConfig, SparseConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.integrations import transformers_quantization_configs
from hf_efficient.integrations import transformers_tensor_parallel as tensor_parallel
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer


CONFIGS = (WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig)


def register() -> None:
    """Registers the configs and the quantizer with transformers. Lets `from_pretrained(quantization_config=...)` ask
    for `dequantize=True` on a quantized checkpoint, which transformers allows a closed tuple of configs.
    Idempotent."""
    for config in CONFIGS:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[config.name] = config
        auto.AUTO_QUANTIZER_MAPPING[config.name] = EfficientQuantizer
        if config not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
            auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (config,)
    transformers_quantization_configs.register(tuple(config.name for config in CONFIGS))
    tensor_parallel.register()
