"""Models whose weights stay in the files of a checkpoint and are read block by block, as `from_pretrained` would read
all at once: names, conversions, dtypes and quantization on arrival are transformers' own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.utils import logging

from hf_efficient.integrations.transformers_compat import block_classes, key_renamer
from hf_efficient.kernels.native.heap import HeapTrimmer
from hf_efficient.layers import CompressedModule
from hf_efficient.tensor_files import StoredTensor, stored_tensors


OUTSIDE = ""  # the name of what lies in no block: embeddings, the last norm, the head


class _Unread:
    """Stands for a tensor in a file while transformers loads: `tensor[...]` reads it, or gives a tensor of its shape on
    the meta device."""

    def __init__(self, stored: StoredTensor, on_meta: bool):
        self.stored, self.on_meta = stored, on_meta

    def __getitem__(self, index):
        return self if self.on_meta else self.stored.read()

    def to(self, device=None, dtype=None) -> torch.Tensor:
        """What transformers calls after `[...]`; here only on the meta device."""
        return torch.empty(self.stored.shape, dtype=dtype or self.stored.dtype, device="meta")

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)

    def get_dtype(self) -> torch.dtype:
        return self.stored.dtype


class BlockFiles:
    """The weights of `model`, in safetensors `files`.

    Attributes:
        blocks: names of the blocks, in order. They and `OUTSIDE` are what can be loaded.
    """

    def __init__(self, model, files, load_config):
        self.model, self._load_config, self._heap = model, load_config, HeapTrimmer()
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            names = [Path(file).name for file in files or ()][:3]
            raise ValueError(f"blocks are read from safetensors files, not from {names}: save the checkpoint again")
        self.stored = {key: tensor for file in files for key, tensor in stored_tensors(file).items()}
        kinds, self.blocks = block_classes(model), []
        for name, module in model.named_modules():
            if type(module).__name__ in kinds and not name.startswith(tuple(f"{block}." for block in self.blocks)):
                self.blocks.append(name)
        self._of_blocks = frozenset(self.blocks)
        if shared := self._shared():
            kind = type(model).__name__
            raise ValueError(f"{shared} share weights, so the blocks of {kind} cannot be read one by one")
        rename = key_renamer(model, load_config.weight_mapping, dict.fromkeys(model.state_dict(), True))
        self._keys: dict[str, list[str]] = {name: [] for name in (OUTSIDE, *self.blocks)}
        for key in self.stored:
            self._keys[self.part_of(rename(key)[0])].append(key)
        self._on_meta: dict[str, dict[str, torch.Tensor]] = {}  # part that is loaded -> its tensors before
        self._missing: set[str] = set()
        self._conversions = None

    def part_of(self, name: str) -> str:
        """The block that the tensor or module `name` lies in, or `OUTSIDE`."""
        parts = name.split(".")
        within = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((prefix for prefix in within if prefix in self._of_blocks), OUTSIDE)

    def _shared(self) -> str | None:
        """Names of two tensors of different parts that are one."""
        seen = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            other = seen.setdefault(id(parameter), name)
            if self.part_of(name) != self.part_of(other):
                return f"{other} and {name}"
        return None

    def declare(self):
        """Has transformers load the whole checkpoint without reading it: every weight stays on the meta device. Returns
        its report and the index of what is offloaded, None."""
        found = {key: _Unread(stored, on_meta=True) for key, stored in self.stored.items()}
        report, offloaded = self._convert(found)
        self._missing, self._conversions = set(report.missing_keys), self.model._weight_conversions
        return report, offloaded

    def _convert(self, tensors: dict[str, _Unread]):
        with _no_bars():
            return convert_and_load_state_dict_in_model(
                model=self.model, state_dict=tensors, load_config=self._load_config
            )

    def size(self, part: str) -> int:
        """Bytes that the files hold of `part`."""
        return sum(self.stored[key].size for key in self._keys[part])

    def declared(self, part: str) -> dict[str, torch.Tensor]:
        """Full name -> meta tensor, of a part that is not loaded. Tied tensors stand there once."""
        tensors = dict(self._tensors(part, on_meta=True))
        return {name: tensor for name, tensor in {id(t): (n, t) for n, t in tensors.items()}.values()}

    @property
    def quantizer(self):
        """The quantizer of the model."""
        return self._load_config.hf_quantizer

    def load(self, part: str) -> None:
        """Reads a block, or `OUTSIDE`, into the model; nothing where it is there already."""
        if part in self._on_meta:
            return
        self._on_meta[part] = dict(self._tensors(part, on_meta=True))
        self._convert({key: _Unread(self.stored[key], on_meta=False) for key in self._keys[part]})
        self.model._weight_conversions = self._conversions  # of all weights, not only of these
        if part == OUTSIDE:
            self.model.tie_weights(missing_keys=set(self._missing), recompute_mapping=False)
        for parameter in self.module(part).parameters():
            parameter.requires_grad_(False)

    def release(self, part: str) -> None:
        """Puts meta tensors in the place of what `load` has read, or of what it was compressed to."""
        before = self._on_meta.pop(part, {})
        for module in self._modules(part).values():
            if isinstance(module, CompressedModule):
                module.restore_canonical()
        for name, tensor in list(self._tensors(part, on_meta=False)):
            if name in self._missing and name not in before:
                continue  # no file has it
            prefix, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(prefix)
            empty = before.get(name)
            if empty is None or (empty.shape, empty.dtype) != (tensor.shape, tensor.dtype):
                empty = torch.empty_like(tensor, device="meta")
            if leaf in module._parameters:
                is_own = isinstance(empty, nn.Parameter)
                module._parameters[leaf] = empty if is_own else nn.Parameter(empty, requires_grad=False)
            else:
                module._buffers[leaf] = empty
        self._heap.flush()

    @property
    def loaded(self) -> list[str]:
        """The parts that are in memory."""
        return list(self._on_meta)

    def module(self, part: str) -> nn.Module:
        return self.model.get_submodule(part)

    def _modules(self, part: str) -> dict[str, nn.Module]:
        """Full name -> module, of all that lies in `part`."""
        if part != OUTSIDE:
            return {f"{part}.{name}".rstrip("."): module for name, module in self.module(part).named_modules()}
        return {name: module for name, module in self.model.named_modules() if self.part_of(name) == OUTSIDE}

    def _tensors(self, part: str, on_meta: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """(full name, tensor) of the parameters and saved buffers of a part that are, or are not, meta tensors."""
        for prefix, module in self._modules(part).items():
            buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for leaf, tensor in (module._parameters | buffers).items():
                if tensor is not None and tensor.is_meta == on_meta:
                    yield f"{prefix}.{leaf}".lstrip("."), tensor

    @contextmanager
    def read_when_called(self, blocks: list[str]):
        """Inside, `OUTSIDE` is in memory, and each of `blocks` from the first call of one of its modules that hold
        weights to the end of its own call."""
        hooks = []

        def read(block):
            return lambda *_: self.load(block)

        def leave(block):
            return lambda *_: self.release(block)

        self.load(OUTSIDE)
        try:
            for block in blocks:
                for module in self._modules(block).values():
                    if module._parameters or module._buffers:
                        hooks.append(module.register_forward_pre_hook(read(block)))
                hooks.append(self.module(block).register_forward_hook(leave(block)))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for part in self.loaded:
                self.release(part)

    def write(self, part: str, path: Path) -> None:
        """Saves a part that is in memory as the safetensors file `path`, under the names that `save_pretrained` gives
        its tensors. The file is there when it is whole."""
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if self.part_of(name) == part}
        unread = [name for name, tensor in tensors.items() if tensor.is_meta]
        if unread:
            raise RuntimeError(f"{unread[0]} is to be saved, and was not read")
        with self._scratch(path.parent, tensors) as folder:
            os.replace(folder / "model.safetensors", path)

    def write_configs(self, folder: Path) -> None:
        """Saves what `save_pretrained` writes beside weights."""
        with self._scratch(folder, {}) as scratch:
            for path in scratch.iterdir():
                if path.suffix != ".safetensors":
                    os.replace(path, folder / path.name)

    @contextmanager
    def _scratch(self, parent: Path, tensors: dict[str, torch.Tensor]):
        """A folder to which the model has been saved with these tensors alone."""
        quantizer = self.quantizer
        quantizer.forget_conversions(self.model)
        quantizer.part_to_save = tensors
        try:
            with _no_bars(), tempfile.TemporaryDirectory(prefix=".part-", dir=parent) as folder:
                type(self.model).save_pretrained(self.model, folder, max_shard_size="1000000GB")
                yield Path(folder)
        finally:
            self.model._weight_conversions, quantizer.part_to_save = self._conversions, None


@contextmanager
def _no_bars():
    """Inside, transformers shows no bars: there would be one for every block."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


def load_in_files(model_class: type, name, make_residence, **options):
    """`model_class.from_pretrained(name, **options)` with a `quantization_config` of ours, of which every weight stays
    in its file. Methods that need calibration compress block by block.

    Args:
        make_residence: called with the `BlockFiles` of the model -> the residence that `calibrate` takes.

    Returns:
        (model, residence): every tensor of the model is on the meta device.
    """
    residences = []

    def load(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        model.__class__ = model_class
        files = BlockFiles(model, checkpoint_files, load_config)
        report = files.declare()
        residences.append(make_residence(files))
        load_config.hf_quantizer.residence = residences[0]
        return report

    own = {"__module__": model_class.__module__, "_load_pretrained_model": staticmethod(load)}
    in_files = type(model_class.__name__, (model_class,), own)
    model = in_files.from_pretrained(name, **options)
    return model, residences[0]
