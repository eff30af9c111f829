"""How transformers reads the `quantization_config` of a checkpoint, and merges it with the caller's.

Touches the insides of transformers in two places. `PreTrainedConfig.get_config_dict`: `from_pretrained` takes the
config of a part of a composite model (a CLIP tower) out of its dict and leaves `quantization_config`, which is the
whole's. `AutoHfQuantizer.merge_quantization_configs`: it refuses a config of another class than the checkpoint's,
ignores one of the same class, and has no registry.
"""

import functools
from collections.abc import Callable

from transformers.configuration_utils import PreTrainedConfig
from transformers.quantizers import auto

from hf_efficient.checkpoints import config_conflicts
from hf_efficient.integrations import transformers_compat


# quant_method of a checkpoint -> f(the checkpoint's config as a dict, the caller's config) -> a config, or None
READERS: dict[str, Callable] = {}


def register(methods: tuple[str, ...]) -> None:
    """Tells parts of checkpoints whose `quant_method` is one of `methods` their `quantization_config`, refuses a
    config of ours for a checkpoint that is compressed otherwise, and asks `READERS`. Idempotent.

    Raises:
        ImportError: transformers lacks an inside that this needs. Names the supported releases.
    """
    transformers_compat.require("integrations/transformers_quantization_configs.py")
    get = PreTrainedConfig.get_config_dict.__func__
    if not hasattr(get, "_hf_efficient"):
        PreTrainedConfig.get_config_dict = classmethod(_telling_parts(get, methods))
    merge = auto.AutoHfQuantizer.merge_quantization_configs
    if not hasattr(merge, "_hf_efficient"):
        auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(_checking(merge))


def _telling_parts(original, methods: tuple[str, ...]):
    @functools.wraps(original)
    def get_config_dict(cls, *args, **kwargs):
        found, unused = original(cls, *args, **kwargs)
        if not isinstance(found, dict):  # a config.json that holds something else, which transformers refuses
            return found, unused
        saved, own = found.get("quantization_config"), getattr(cls, "model_type", "")
        if isinstance(saved, dict) and saved.get("quant_method") in methods and found.get("model_type") != own:
            for key, part in found.items():
                is_own = isinstance(part, dict) and (key == cls.base_config_key or part.get("model_type") == own)
                if is_own and own:
                    part.setdefault("quantization_config", saved)
        return found, unused

    get_config_dict._hf_efficient = True
    return get_config_dict


def _checking(original):
    @functools.wraps(original)
    def merge_quantization_configs(quantization_config, quantization_config_from_args):
        saved, given = quantization_config, quantization_config_from_args
        as_dict = saved if isinstance(saved, dict) else saved.to_dict()
        read = READERS.get(as_dict.get("quant_method"), lambda saved, given: None)(as_dict, given)
        return read or original(saved, config_conflicts.check(saved, given))

    merge_quantization_configs._hf_efficient = True
    return merge_quantization_configs
