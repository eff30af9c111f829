"""lm-evaluation-harness: the model `hf-efficient`, which is the harness's `hf` with the arguments of our configs.

`hf-efficient exec lm_eval --model hf-efficient --model_args pretrained=MODEL,bits=4,group_size=64 --tasks TASK`
compresses while loading; `--model hf --model_args pretrained=FOLDER` loads what was saved.
"""

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.integrations import transformers_registration


CONFIGS = {config.name: config for config in transformers_registration.CONFIGS}


@register_model("hf-efficient")
class EfficientLM(HFLM):
    """`hf` with, among its model arguments, `quant_method` (default "efficient_weight_only") and what its config
    takes."""

    def _create_model(self, pretrained, *args, quantization_config=None, **options):
        method = options.pop("quant_method", WeightOnlyConfig.name)
        if method not in CONFIGS:
            raise ValueError(f"quant_method={method!r} is not supported: it must be one of {sorted(CONFIGS)}")
        given = {field: options.pop(field) for field in CONFIGS[method]._fields() if field in options}
        if given and quantization_config is not None:
            raise ValueError(f"pretrained={pretrained!r} is compressed already: {sorted(given)[0]!r} has no meaning")
        config = CONFIGS[method](**given) if given else quantization_config
        super()._create_model(pretrained, *args, quantization_config=config, **options)
