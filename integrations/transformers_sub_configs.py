"""The `quantization_config` of a composite checkpoint, told to a part of its model that is loaded alone (a CLIP tower).

Touches the insides of transformers in one place: `PreTrainedConfig.get_config_dict`, out of whose dict `from_pretrained` takes the
config of the part and leaves `quantization_config`, which is the whole's. Other checkpoints than ours pass through untouched.
"""

import functools
import inspect

from transformers.configuration_utils import PreTrainedConfig


_SUPPORTED = "transformers 5.23"


def register(methods: tuple[str, ...]) -> None:
    """Tells parts of checkpoints whose `quant_method` is one of `methods`. Idempotent.

    Raises ImportError when transformers lacks the inside that this needs, naming the versions that have it.
    """
    get = inspect.getattr_static(PreTrainedConfig, "get_config_dict", None)
    if not isinstance(get, classmethod) or not hasattr(PreTrainedConfig, "base_config_key"):
        import transformers

        raise ImportError(
            "hf_efficient needs PreTrainedConfig.get_config_dict and base_config_key, which transformers "
            f"{transformers.__version__} does not have. Supported: {_SUPPORTED}."
        )
    if not hasattr(get.__func__, "_hf_efficient"):
        PreTrainedConfig.get_config_dict = classmethod(_telling_parts(get.__func__, methods))


def _telling_parts(original, methods: tuple[str, ...]):
    @functools.wraps(original)
    def get_config_dict(cls, *args, **kwargs):
        found, unused = original(cls, *args, **kwargs)
        saved, own = found.get("quantization_config"), getattr(cls, "model_type", "")
        if isinstance(saved, dict) and saved.get("quant_method") in methods and found.get("model_type") != own:
            for key, part in found.items():
                is_own = isinstance(part, dict) and (key == cls.base_config_key or part.get("model_type") == own)
                if is_own and own:
                    part.setdefault("quantization_config", saved)
        return found, unused

    get_config_dict._hf_efficient = True
    return get_config_dict
