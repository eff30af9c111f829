"""Reading a saved model a tensor at a time: its files, and the model they belong to, without weights."""

import contextlib
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from hf_efficient.integrations.transformers_compat import model_from_config
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.integrations.transformers_registration import CONFIGS
from hf_efficient.tensor_files import shards


INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def skeleton(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """The model on the meta device, with our layers where the folder holds compressed weights.

    Raises:
        ValueError: transformers has no such architecture, or it was compressed elsewhere.
    """
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise ValueError(
            f"{folder}: transformers {transformers.__version__} has no architecture {config.architectures}"
        )
    saved, ours = getattr(config, "quantization_config", None), [config.name for config in CONFIGS]
    if saved is not None and saved.get("quant_method") not in ours:
        raise ValueError(
            f"{folder}: its quantization_config says quant_method={saved.get('quant_method')!r}, which was not made "
            f"here: it must be one of {ours}"
        )
    with torch.device("meta"):
        model = model_from_config(kind, config, dtype=config.dtype)
        if saved is not None:
            own = AUTO_QUANTIZATION_CONFIG_MAPPING[saved["quant_method"]].from_dict(saved)
            EfficientQuantizer(own, pre_quantized=True).preprocess_model(model=model)
    return model


def open_files(folder: Path, files: contextlib.ExitStack) -> dict:
    """{name of a tensor: the open file that holds it}, of safetensors in the folder itself.

    Raises:
        ValueError: a file is missing or damaged, or the index is none or names a file elsewhere.
    """
    names = shards(folder / INDEX) if (folder / INDEX).is_file() else [WHOLE]
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: the folder holds no {name}; weights are read from safetensors only")
    opened = [_open(folder / name, files) for name in names]
    return {key: file for file in opened for key in file.keys()}


def _open(path: Path, files: contextlib.ExitStack):
    try:
        return files.enter_context(safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file that can be read: {error}") from None


def check(folder: Path, handles: dict, expected: dict, tied: set[str]) -> None:
    """Compares the files with `expected`, {name of a tensor: its shape, or None for any}; those called `tied` may be
    there.

    Raises:
        ValueError: they do not agree; names the tensor.
    """
    missing = sorted(name for name in expected if name not in handles)
    unknown = sorted(name for name in handles if name not in expected and name not in tied)
    if missing or unknown:
        raise ValueError(
            f"{folder}: its files and the architecture in config.json do not name the same tensors: missing "
            f"{missing[:3]}, unknown {unknown[:3]}. Load it with from_pretrained and export the model"
        )
    for name, shape in expected.items():
        found = tuple(handles[name].get_slice(name).get_shape())
        if shape is not None and found != tuple(shape):
            raise ValueError(f"{folder}: {name} is {found} where config.json gives {tuple(shape)}")
