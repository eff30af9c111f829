"""The config of a model that is not loaded: read from any form, checked, and what it says of its compression."""

import copy
import json
import os
from pathlib import Path

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from hf_efficient.configs import CompressionConfig
from hf_efficient.integrations.transformers_registration import register


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MOST_LAYERS = 4096  # a config that names more is taken for a mistake: building its layers would take minutes


def read_config(model) -> PreTrainedConfig:
    """The config of `model`: a config (which is copied), its dict, a config.json, a folder with one, or a Hub id.

    No code of the model is executed.

    Raises:
        ValueError: no such thing, a model type that this transformers does not know, or a size that is missing or no
            positive integer.
    """
    if isinstance(model, PreTrainedConfig):
        return copy.deepcopy(model)
    if isinstance(model, dict):
        name, content = "the config", model
    elif isinstance(model, (str, os.PathLike)):
        name, content = str(model), _read_json(model)
    else:
        raise ValueError(f"model={model!r}: must be a config, its dict, a file, a folder or a Hub id")
    kind = content.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{name}: no model_type, so it is no config of a transformers model")
    if kind not in CONFIG_MAPPING:
        code = " (its own code is not run)" if content.get("auto_map") else ""
        raise ValueError(f"{name}: model_type={kind!r} is not known to transformers {transformers.__version__}{code}")
    cls = CONFIG_MAPPING[kind]
    _check_sizes(name, cls, content)
    try:
        return cls.from_dict(_decoded(content))
    except Exception as error:
        raise ValueError(f"{name}: transformers does not take it as a {cls.__name__}: {error}") from error


def _read_json(model) -> dict:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"{model}: the folder holds no config.json")
    if not path.is_file():
        try:
            found = AutoConfig.from_pretrained(model, trust_remote_code=False) if path.suffix != ".json" else None
        except Exception as error:
            first = " ".join(str(error).splitlines()[:2])  # the Hub's second line says what to do
            raise ValueError(f"{model}: no file, no folder and not to be had from the Hub: {first}") from error
        if found is None:
            raise ValueError(f"{model}: there is no such file")
        return found.to_dict()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return content


def _decoded(value):
    """`value` of a config.json with the numbers that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(part) for part in value] if isinstance(value, list) else value


def _check_sizes(name: str, cls: type, content: dict) -> None:
    for size in _SIZES:
        names = {size, cls.attribute_map.get(size, size)}
        given = {field: content[field] for field in names if field in content}
        for field, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {field}={value!r} must be a positive integer")
            if size == "num_hidden_layers" and value > _MOST_LAYERS:
                raise ValueError(f"{name}: {field}={value} is more than {_MOST_LAYERS}")
        if not given and not cls.sub_configs and any(hasattr(cls, field) for field in names):
            raise ValueError(
                f"{name}: no {' or '.join(sorted(names))}: a {cls.__name__} would take a default, and the estimate "
                "would be that of another model"
            )


def pop_quantization(config: PreTrainedConfig) -> CompressionConfig | None:
    """Takes the `quantization_config` out of a checkpoint's `config`; None where it has none.

    Raises:
        ValueError: it is of another package.
    """
    register()
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    method = saved.get("quant_method")
    cls = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if cls is None or not issubclass(cls, CompressionConfig):
        raise ValueError(
            f"the checkpoint is quantized with {method!r}, which is not estimated: known are this package's methods, "
            "and for the model as it was give a config without quantization_config"
        )
    del config.quantization_config
    return cls.from_dict(saved)
