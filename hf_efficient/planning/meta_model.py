"""A model without weights: built from its config on the meta device, its layers swapped by our quantizer as when loading."""

import copy
import json
import os
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from hf_efficient.configs import CompressionConfig
from hf_efficient.formats import Format
from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.integrations.transformers_compat import loaded_dtype
from hf_efficient.integrations.transformers_registration import register
from hf_efficient.layers import PLACEHOLDER_SHAPE, CompressedModule
from hf_efficient.targets import patterns


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_MOST_LAYERS = 4096
_ROWS = 64  # layouts take whole blocks of at most so many rows


def read_config(model) -> PreTrainedConfig:
    """The config of `model`: a config, its dict, a config.json, a folder with one, or a Hub id. A copy; nothing is executed.

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
        return cls.from_dict(content)
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
            raise ValueError(
                f"{model}: no file, no folder and not to be had from the Hub: {str(error).splitlines()[0]}"
            ) from error
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
                f"{name}: no {' or '.join(sorted(names))}: a {cls.__name__} would take a default, and the estimate would "
                "be that of another model"
            )


def build(config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    """The model that `from_pretrained` would make, on the meta device. Raises ValueError where transformers cannot."""
    cls = _class_of(config)
    try:
        with torch.device("meta"):
            options = {} if attention is None else {"attn_implementation": attention}
            model = cls._from_config(config, dtype=dtype, **options)
    except Exception as error:
        raise ValueError(f"transformers cannot build a {cls.__name__} of this config: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(loaded_dtype(model, name, parameter.dtype))
    return model


def _class_of(config: PreTrainedConfig) -> type:
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


def own_quantization(config: PreTrainedConfig) -> CompressionConfig | None:
    """What the checkpoint of `config` is compressed with, taken out of it. Raises ValueError for a method that is not ours."""
    register()
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    method = saved.get("quant_method")
    cls = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if cls is None or not issubclass(cls, CompressionConfig):
        raise ValueError(
            f"the checkpoint is quantized with {method!r}, which is not estimated: known are this package's methods, and "
            "for the model as it was give a config without quantization_config"
        )
    del config.quantization_config
    return cls.from_dict(saved)


def compress(model: nn.Module, quantization: CompressionConfig, check_names: bool) -> None:
    """Swaps the modules that `quantization` compresses, as for a checkpoint that was saved with it: methods that need data
    too, whose overrides of `mixed_precision` and factors on inputs are only known afterwards. check_names: raise ValueError
    for patterns that match no module."""
    if check_names:
        patterns.check_names(quantization, model)
    register()
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
    quantizer.preprocess_model(model, dtype=model.dtype, checkpoint_files=None, device_map=None)
    if check_names:
        compressed = {name for name, module in model.named_modules() if isinstance(module, CompressedModule)}
        patterns.check_overrides(quantization, model, compressed)


def parameters_of(module: nn.Module) -> int:
    """Numbers that the module's own parameters stand for, compressed or not."""
    if not isinstance(module, CompressedModule):
        return sum(parameter.numel() for parameter in module.parameters(recurse=False))
    weights = module.compressed_weights()
    hidden = {name for weight in weights for name in (weight.prefix[:-1] or "weight", *weight.names().values())}
    rest = [parameter for name, parameter in module.named_parameters(recurse=False) if name not in hidden]
    return sum((w.experts or 1) * w.out_features * w.in_features for w in weights) + sum(p.numel() for p in rest)


def checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that `save_pretrained` writes; tensors that are tied count once."""
    persistent = set(model.state_dict(keep_vars=True))
    tensors = {t.untyped_storage()._cdata: t.nbytes for name, t in _named_tensors(model) if name in persistent}
    return sum(tensors.values())


def bytes_by_module(model: nn.Module, kind: str | None) -> dict[nn.Module, dict]:
    """Module -> what is allocated -> bytes of its own parameters and buffers in memory. kind: "cpu" for compressed weights in
    the layouts of this machine's CPU, "accelerator" for those of the Triton kernels, None for the checkpoint's."""
    found, layouts = {}, {}
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        found[module] = {t.untyped_storage()._cdata: t.nbytes for t in tensors}
        if kind is not None and isinstance(module, CompressedModule):
            dtype = next(p.dtype for p in module.parameters(recurse=False) if p.shape == PLACEHOLDER_SHAPE)
            for weight in module.compressed_weights():
                key = weight.format, weight.out_features, weight.in_features, dtype
                if key not in layouts:
                    layouts[key] = _growth(*key, kind)
                found[module][module, weight.prefix] = (weight.experts or 1) * layouts[key]
    return found


def _growth(format: Format, out_features: int, in_features: int, dtype: torch.dtype, kind: str) -> int:
    """Bytes that a weight's layout takes more than its canonical tensors. Layouts are made of equal blocks of rows, so two
    small ones tell the size of a large one."""
    rows = out_features % _ROWS + _ROWS
    small = _growth_of(format, min(rows, out_features), in_features, dtype, kind)
    if out_features <= rows:
        return small
    block = _growth_of(format, rows + _ROWS, in_features, dtype, kind) - small
    return small + (out_features - rows) // _ROWS * block


def _growth_of(format: Format, out_features: int, in_features: int, dtype: torch.dtype, kind: str) -> int:
    dtypes, shapes = format.dtypes(dtype), format.shapes(out_features, in_features)
    tensors = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    if isinstance(format, MaskedFormat):
        tensors[format.mask_name] = format.pack_mask(_even_mask(format, out_features, in_features))
    if kind == "accelerator":
        tensors = {name: tensor.as_subclass(_Accelerated) for name, tensor in tensors.items()}
        with _OnTheCPU():
            layout = format.layout(tensors, in_features, dtype)
    else:
        layout = format.layout(tensors, in_features, dtype)
    replaced = tensors["qweight"].nbytes if layout.replaces_qweight else 0
    return sum(map(_allocated, layout.tensors.values())) - replaced


def _even_mask(format: MaskedFormat, out_features: int, in_features: int) -> torch.Tensor:
    """A mask bool [out_features, in_features] of a pruned weight, as good as any: what is kept lies evenly."""
    count = out_features * in_features
    kept = torch.Size(format.kept_shape(out_features, in_features)).numel()
    return (torch.arange(count + 1) * kept // count).diff().bool().view(out_features, in_features)


def _allocated(tensor: torch.Tensor) -> int:
    """Bytes behind `tensor`, which may be a part of what was allocated; those of an opaque one are its numbers'."""
    return tensor.nbytes if tensor.is_mkldnn else tensor.untyped_storage().nbytes()


class _Accelerated(torch.Tensor):
    """A tensor of the CPU that says it lies on an accelerator, so that a format makes the layout that it makes there."""

    is_cuda = True
    device = torch.device("cuda")


class _OnTheCPU(TorchFunctionMode):
    """Tensors that a layout makes on the device of such a tensor are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") is not None else kwargs))


def _named_tensors(model: nn.Module):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
