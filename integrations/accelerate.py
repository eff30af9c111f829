"""accelerate: a compressed model without weights, which its planning and dispatching functions take as they take any
other."""

from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_efficient.configs import CompressionConfig
from hf_efficient.integrations import transformers_loading
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.integrations.transformers_registration import CONFIGS


def empty_model(
    model: str, quantization_config: CompressionConfig | None = None, auto_class=AutoModelForCausalLM, **options
) -> PreTrainedModel:
    """The model on the meta device with compressed layers in place of its linear ones: `compute_module_sizes`
    and `infer_auto_device_map` count the bytes that they will hold, and `load_checkpoint_and_dispatch` fills it
    from the folder of a saved checkpoint (of architectures whose checkpoints name their tensors as their modules do;
    for the others there is `from_pretrained(device_map=...)`).

    Args:
        model: Hub id or folder; only its config.json is read.
        quantization_config: how it would be compressed; None: as its config.json says.
        auto_class: a class of transformers with `from_config`.
        options: revision, token, ... as in `from_pretrained`; others are those of `from_config`, for example `dtype`.

    Raises:
        ValueError: there is no config of this package, given or saved.
    """
    hub_options = {name: options.pop(name) for name in transformers_loading.ARGUMENTS if name in options}
    config = AutoConfig.from_pretrained(model, **hub_options)
    saved = getattr(config, "quantization_config", None)
    if quantization_config is None:
        kinds = {kind.name: kind for kind in CONFIGS}
        method = (saved or {}).get("quant_method")
        if method not in kinds:
            raise ValueError(f"{model}: its quant_method is {method!r}; give one of {[c.__name__ for c in CONFIGS]}")
        quantization_config = kinds[method](**saved)
    elif saved is not None:
        raise ValueError(f"{model} is compressed already: leave quantization_config out")
    with init_empty_weights():
        empty = auto_class.from_config(config, **options, trust_remote_code=hub_options.get("trust_remote_code"))
        # As a saved checkpoint: calibrated methods, too, have their final tensors then
        EfficientQuantizer(quantization_config, pre_quantized=True).preprocess_model(empty)
    empty.tie_weights()
    return empty.eval()
