"""What is exported: a model in memory or the folder it was saved to, as compressed layers and dense tensors."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from hf_efficient.layers import CompressedModule, CompressedWeight


INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Layer:
    """One compressed weight: `name` of its module (or of a fused expert weight), and `read(part)`, which gives a canonical
    tensor. `transposed`: the module is a `Conv1D`."""

    name: str
    weight: CompressedWeight
    transposed: bool
    read: Callable[[str], torch.Tensor]


@dataclass
class Source:
    """`layers` are compressed, `kept` names the linear layers that are not, `dense()` gives every other tensor by its name
    in a checkpoint, tied ones once."""

    architecture: str  # the model's class
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    tokenizer: object
    dtype: torch.dtype
    layers: list[Layer]
    kept: list[str]
    dense_names: list[str]
    read_dense: Callable[[str], torch.Tensor]

    def dense(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.dense_names:
            yield name, self.read_dense(name)


@contextlib.contextmanager
def open_source(model, tokenizer=None):
    """The `Source` of a model, or of a folder whose files stay open as long as the context.

    Raises:
        ValueError: it is neither, or the folder is not one that was saved here or by transformers.
    """
    with contextlib.ExitStack() as files:
        if isinstance(model, PreTrainedModel):
            yield _of_model(model, tokenizer)
        elif isinstance(model, nn.Module):
            raise ValueError(
                f"a {type(model).__name__} cannot be exported: it must be a PreTrainedModel, as transformers loads"
            )
        else:
            yield _of_folder(Path(model), tokenizer, files)


def _of_model(model: PreTrainedModel, tokenizer) -> Source:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model carries adapters: merge them, or remove them with delete_adapter(), before exporting"
        )
    away = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if away:
        raise ValueError(
            f"{len(away)} weights are not in memory, for example {away[0]}: load the model without offloading, or export the "
            "folder it was saved to"
        )
    layers, inside = [], set()
    for name, module in model.named_modules():
        if isinstance(module, CompressedModule):
            for weight in module.compressed_weights():
                inside |= {f"{name}.{leaf}" for leaf in (*weight.names().values(), weight.prefix[:-1] or "weight")}
                read = _reader_of_module(module, weight.prefix)
                layers.append(Layer(_renamed(model, _full_name(name, weight)), weight, _is_transposed(module), read))
    buffers = {name for module_name, module in model.named_modules() for name in _volatile(module_name, module)}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    dense = {
        name: t.detach()
        for name, t in tensors.items()
        if name not in inside | buffers | set(model.all_tied_weights_keys)
    }
    dense = revert_weight_conversion(model, dense)
    generation = model.generation_config if model.can_generate() else None
    return Source(
        type(model).__name__,
        model.config,
        generation,
        tokenizer,
        model.dtype,
        layers,
        _kept(model),
        list(dense),
        dense.__getitem__,
    )


def _of_folder(folder: Path, tokenizer, files: contextlib.ExitStack) -> Source:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: the folder holds no config.json")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = _skeleton(config, folder)
    handles = {key: opened for opened in _open_files(folder, files) for key in opened.keys()}
    layers, expected = [], {}
    for name, module in model.named_modules():
        if isinstance(module, CompressedModule):
            for weight in module.compressed_weights():
                shapes = {f"{name}.{parameter}": shape for parameter, shape in weight.shapes().items()}
                names = {part: f"{name}.{parameter}" for part, parameter in weight.names().items()}
                expected |= {**shapes, f"{name}.{weight.prefix[:-1] or 'weight'}": None}
                layers.append(
                    Layer(_full_name(name, weight), weight, _is_transposed(module), _reader_of_file(handles, names))
                )
    compressed = set(expected)
    volatile = {name for module_name, module in model.named_modules() for name in _volatile(module_name, module)}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expected |= {name: tuple(t.shape) for name, t in tensors.items() if name not in compressed | volatile}
    tied = set(model.all_tied_weights_keys)
    _check(folder, handles, {name: shape for name, shape in expected.items() if name not in tied}, tied)
    dense = [name for name in expected if name not in compressed | tied]
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # none was saved
        generation = None
    if tokenizer is None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    read = lambda name: handles[name].get_tensor(name)  # noqa: E731
    return Source(type(model).__name__, config, generation, tokenizer, model.dtype, layers, _kept(model), dense, read)


def _skeleton(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """The model on the meta device, with our layers where the folder holds compressed weights."""
    import transformers

    from hf_efficient.integrations.transformers_quantizer import CONFIGS, EfficientQuantizer

    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise ValueError(
            f"{folder}: transformers {transformers.__version__} has no architecture {config.architectures}"
        )
    saved = getattr(config, "quantization_config", None)
    with torch.device("meta"):
        model = kind._from_config(config, dtype=config.dtype)
    if saved is not None:
        method = saved.get("quant_method")
        if method not in [config.name for config in CONFIGS]:
            raise ValueError(
                f"{folder}: its quantization_config says quant_method={method!r}, which was not made here: it must be one of "
                f"{[config.name for config in CONFIGS]}"
            )
        own = AUTO_QUANTIZATION_CONFIG_MAPPING[method].from_dict(saved)
        with torch.device("meta"):
            EfficientQuantizer(own, pre_quantized=True).preprocess_model(model=model)
    return model


def _open_files(folder: Path, files: contextlib.ExitStack) -> list:
    """Every safetensors file of the checkpoint, opened; only files of the folder itself."""
    names = {WHOLE}
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{folder / INDEX} names the file {name!r}: it must be a .safetensors file in the same folder"
            )
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: the folder holds no {name}; weights are read from safetensors only")
    return [files.enter_context(safe_open(folder / name, framework="pt")) for name in sorted(names)]


def _check(folder: Path, handles: dict, expected: dict, tied: set[str]) -> None:
    """Raises where the files and the architecture do not agree."""
    missing = sorted(name for name in expected if name not in handles)
    unknown = sorted(name for name in handles if name not in expected and name not in tied)
    if missing or unknown:
        raise ValueError(
            f"{folder}: its files and the architecture in config.json do not name the same tensors: missing {missing[:3]}, "
            f"unknown {unknown[:3]}. Load it with from_pretrained and export the model"
        )
    for name, shape in expected.items():
        found = tuple(handles[name].get_slice(name).get_shape())
        if shape is not None and found != tuple(shape):
            raise ValueError(f"{folder}: {name} is {found} where config.json gives {tuple(shape)}")


def _reader_of_module(module: CompressedModule, prefix: str):
    def read(part):
        tensor = module._parameters.get(prefix + part)
        return (module.canonical(prefix)[part] if tensor is None else tensor).detach().cpu()

    return read


def _reader_of_file(handles: dict, names: dict[str, str]):
    return lambda part: handles[names[part]].get_tensor(names[part])


def _full_name(module_name: str, weight: CompressedWeight) -> str:
    return module_name if weight.experts is None else f"{module_name}.{weight.prefix[:-1]}"


def _renamed(model: PreTrainedModel, name: str) -> str:
    """The name that the module called `name` has in a checkpoint."""
    probe = revert_weight_conversion(model, {f"{name}.weight": torch.empty(0, device="meta")})
    return next(iter(probe)).removesuffix(".weight")


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "transposed", False))


def _kept(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def _volatile(name: str, module: nn.Module) -> list[str]:
    """Full names of what a checkpoint does not hold."""
    return [f"{name}.{buffer}" if name else buffer for buffer in module._non_persistent_buffers_set]
