"""Checkpoints in transformers' layout, written atomically: safetensors in shards, configs and the tokenizer."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import logging

from hf_efficient.checkpoints.export.saved_folder import INDEX, WHOLE
from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.files import new_folder


SHARD_BYTES = 5_000_000_000


class FolderTarget:
    """What a layout answers. It is made of a `Source`, and raises ValueError then for layers that it cannot hold.
    `rounding`: see `ExportReport`."""

    rounding = 0.0

    def tensors(self, layer: Layer) -> dict[str, torch.Tensor]:
        """What is written for the layer, by the names within its module."""
        raise NotImplementedError

    def quantization_config(self) -> dict:
        """The `quantization_config` of config.json."""
        raise NotImplementedError

    def engines(self) -> tuple[str, ...]:
        """The engines that read the folder."""
        raise NotImplementedError


def write(source: Source, target: FolderTarget, output: Path, describe: Callable[[Path], None]) -> float:
    """Writes the folder `output`; returns the target's `rounding`. describe: adds files to the folder it is called
    with, which becomes `output`."""
    with new_folder(output) as new:
        shards = _Shards(new)
        for layer in logging.tqdm(source.layers, desc="exporting", leave=False):
            for name, tensor in target.tensors(layer).items():
                shards.add(f"{layer.name}.{name}", tensor)
        for name, tensor in source.dense():
            shards.add(name, tensor)
        shards.finish()
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(new)
        if source.generation_config is not None:
            source.generation_config.save_pretrained(new)
        config = copy.deepcopy(source.config)
        config.quantization_config = target.quantization_config()
        config.dtype, config.architectures = source.dtype, [source.architecture]
        config.save_pretrained(new)
        describe(new)
    return target.rounding


class _Shards:
    """Collects tensors and writes a file whenever `SHARD_BYTES` of them are there."""

    def __init__(self, folder: Path):
        self.folder, self.files, self.names, self.held, self.size, self.total = folder, [], {}, {}, 0, 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.held and self.size + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self.held[name] = tensor.detach().cpu().contiguous()
        self.size += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        file = self.folder / f"part-{len(self.files):05d}"
        save_file(self.held, file, metadata={"format": "pt"})
        self.files.append(file)
        self.names |= dict.fromkeys(self.held, len(self.files))
        self.held, self.size = {}, 0

    def finish(self) -> None:
        self._flush()
        if len(self.files) == 1:
            self.files[0].rename(self.folder / WHOLE)
            return
        final = {i: f"model-{i:05d}-of-{len(self.files):05d}.safetensors" for i in range(1, len(self.files) + 1)}
        for number, file in enumerate(self.files, 1):
            file.rename(self.folder / final[number])
        index = {"metadata": {"total_size": self.total}, "weight_map": {n: final[i] for n, i in self.names.items()}}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
