"""What is exported: a model in memory or the folder it was saved to, as compressed layers and dense tensors."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_efficient.checkpoints.export import saved_folder
from hf_efficient.checkpoints.export.checkpoint_names import CheckpointNames
from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import CompressedModule, CompressedWeight


@dataclass(frozen=True)
class Layer:
    """One compressed weight of a checkpoint: `name` of its module there, and `read(part)`, which gives a canonical
    tensor.
    `transposed`: the module is a `Conv1D`. `is_embedding`: it is the input embedding. Fused experts are a layer each,
    where checkpoints have them apart."""

    name: str
    weight: CompressedWeight
    transposed: bool
    read: Callable[[str], torch.Tensor]
    is_embedding: bool = False


@dataclass
class Source:
    """`layers` are compressed, `kept` names the linear layers that are not, by their modules' names and by those in a
    checkpoint; `read_dense` gives every other tensor by one of `dense_names`, tied ones once."""

    architecture: str  # the model's class
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    tokenizer: object
    dtype: torch.dtype
    layers: list[Layer]
    kept: list[str]
    dense_names: list[str]
    read_dense: Callable[[str], torch.Tensor]

    def with_dense_embedding(self) -> "Source":
        """This source with the input embedding dequantized, for targets that quantize linear layers only."""
        embeddings = {f"{layer.name}.weight": layer for layer in self.layers if layer.is_embedding}

        def read_dense(name):
            if name not in embeddings:
                return self.read_dense(name)
            weight, read = embeddings[name].weight, embeddings[name].read
            return weight.format.dequantize({p: read(p) for p in weight.names()}, weight.in_features, self.dtype)

        layers = [layer for layer in self.layers if not layer.is_embedding]
        names = [*self.dense_names, *embeddings]
        return dataclasses.replace(self, layers=layers, dense_names=names, read_dense=read_dense)

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
            f"{len(away)} weights are not in memory, for example {away[0]}: load the model without offloading, or "
            "export the folder it was saved to"
        )
    names = CheckpointNames(model)
    layers = [
        layer
        for name, module, weight in _compressed(model)
        for layer in _layers(names, name, module, weight, _reader_of_module(module, weight.prefix))
    ]
    dense = names.revert({name: tensor.detach() for name, tensor in _dense(model).items()})
    generation = model.generation_config if model.can_generate() else None
    rest = generation, tokenizer, model.dtype, layers, _kept(model, names), list(dense), dense.__getitem__
    return Source(type(model).__name__, model.config, *rest)


def _of_folder(folder: Path, tokenizer, files: contextlib.ExitStack) -> Source:
    """The source that reads a saved folder layer by layer. `files` closes what it opens."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: the folder holds no config.json")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = saved_folder.skeleton(config, folder)
    handles = saved_folder.open_files(folder, files)
    names, layers, stored = CheckpointNames(model), [], {}
    for name, module, weight in _compressed(model):
        place = names.of_module(name)
        stored |= {f"{place}.{parameter}": shape for parameter, shape in weight.shapes().items()}
        stored[f"{place}.{weight.prefix[:-1] or 'weight'}"] = None  # the placeholder
        parts = {part: f"{place}.{parameter}" for part, parameter in weight.names().items()}
        layers += _layers(names, name, module, weight, _reader_of_file(handles, parts))
    dense = names.revert(_dense(model))
    saved_folder.check(folder, handles, stored | {name: t.shape for name, t in dense.items()}, names.tied)
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # none was saved
        generation = None
    if tokenizer is None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rest = generation, tokenizer, model.dtype, layers, _kept(model, names), list(dense)
    return Source(type(model).__name__, config, *rest, lambda name: handles[name].get_tensor(name))


def _compressed(model: PreTrainedModel) -> Iterator[tuple[str, CompressedModule, CompressedWeight]]:
    for name, module in model.named_modules():
        if isinstance(module, CompressedModule):
            for weight in module.compressed_weights():
                yield name, module, weight


def _dense(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The other tensors of a checkpoint, by the model's names, tied ones once."""
    out = set(model.all_tied_weights_keys)
    for name, _, weight in _compressed(model):
        out |= {f"{name}.{leaf}" for leaf in (*weight.names().values(), weight.prefix[:-1] or "weight")}
    for name, module in model.named_modules():
        out |= {f"{name}.{buffer}" if name else buffer for buffer in module._non_persistent_buffers_set}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name not in out}


def _layers(names: CheckpointNames, name: str, module: CompressedModule, weight: CompressedWeight, read) -> list[Layer]:
    """The layers that a weight of `module`, called `name`, is in a checkpoint."""
    weight, read = _with_zeros(weight, read)
    if weight.experts is None:
        transposed, is_embedding = getattr(module, "transposed", False), isinstance(module, nn.Embedding)
        return [Layer(names.of_module(name), weight, transposed, read, is_embedding)]
    fused = f"{name}.{weight.prefix[:-1]}"
    are_alike = not module.is_transposed and weight.format.experts is None
    apart = names.experts(fused, weight, read) if are_alike else None
    if apart is None:
        return [Layer(fused, weight, False, read)]
    return [
        Layer(own, CompressedWeight("", rows, weight.in_features, weight.format), False, read_own)
        for own, (rows, read_own) in apart.items()
    ]


def _with_zeros(weight: CompressedWeight, read):
    """Codes of a pruned weight as those of all of it, which other engines have."""
    format = weight.format
    if not isinstance(format, MaskedFormat) or format.weights is None:
        return weight, read
    parts = format.shapes(weight.out_features, weight.in_features)

    def read_dense(part):
        if part != "qweight":
            return read(part)
        return format.with_zeros({name: read(name) for name in parts}, weight.in_features)["qweight"]

    return dataclasses.replace(weight, format=format.weights), read_dense


def _kept(model: PreTrainedModel, names: CheckpointNames) -> list[str]:
    """Routers are among them: engines have a linear layer where transformers has a module of its own."""
    own = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear or (name.endswith((".gate", ".router")) and hasattr(module, "weight"))
    ]
    return list(dict.fromkeys([*own, *map(names.of_module, own)]))


def _reader_of_module(module: CompressedModule, prefix: str):
    def read(part):
        tensor = module._parameters.get(prefix + part)
        return (module.canonical(prefix)[part] if tensor is None else tensor).detach().cpu()

    return read


def _reader_of_file(handles: dict, names: dict[str, str]):
    return lambda part: handles[names[part]].get_tensor(names[part])
