"""The headers of safetensors files: which tensors a checkpoint holds, known before any of it is loaded."""

import re
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.integrations.transformers_compat import key_renamer, optional_names


FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of an ordinary weight, in safetensors' words


def wanted(dtypes, shape=None) -> str:
    """A dtype of `dtypes` and a shape (None: any length there) in words."""
    sizes = "" if shape is None else f" {tuple('any' if length is None else length for length in shape)}"
    return " or ".join(dtypes) + sizes


@dataclass(frozen=True)
class Place:
    """A tensor in a file; dtype in safetensors' words."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    def expect(self, dtypes, shape=None, reason: str = "") -> "Place":
        """This place. Raises ValueError, naming the tensor and what was expected, unless it has one of `dtypes` and,
        where that is given, `shape`. reason: follows in the message."""
        lengths = self.shape if shape is None else shape
        fits = len(self.shape) == len(lengths) and all(n in (None, m) for n, m in zip(lengths, self.shape))
        if self.dtype not in dtypes or not fits:
            found = self.dtype if shape is None else f"{self.dtype} {self.shape}"
            raise ValueError(f"{self.key} is {found}, expected {wanted(dtypes, shape)}{reason}")
        return self

    def read(self, opened: dict | None = None) -> torch.Tensor:
        """The tensor, mapped. opened: file -> what `safe_open` gave, kept for the next tensors of the file."""
        opened = {} if opened is None else opened
        if self.file not in opened:
            opened[self.file] = safe_open(self.file, framework="pt")
        return opened[self.file].get_tensor(self.key)


def read_headers(files) -> tuple[dict[str, Place], dict[str, dict[str, str]]]:
    """(key -> its place, file -> its metadata) of safetensors `files`.

    Raises:
        ValueError: a file is no (whole) safetensors file (pickles are not read), or two hold the same key.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        names = [str(file).rpartition("/")[2] for file in files or ()][:3]
        raise ValueError(
            f"hf_efficient reads quantized checkpoints from safetensors files, not from {names}: others can run code "
            "when they are opened; save the checkpoint again with safetensors"
        )
    places, metadata = {}, {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                metadata[file] = opened.metadata() or {}
                pieces = {key: opened.get_slice(key) for key in opened.keys()}
                found = [Place(file, key, x.get_dtype(), tuple(x.get_shape())) for key, x in pieces.items()]
        except SafetensorError as error:
            raise ValueError(f"{file} is not a safetensors file that can be read: {error}") from None
        for place in found:
            if place.key in places:
                other = places[place.key].file
                raise ValueError(f"{place.key} is in {other} and in {file}: a checkpoint holds it once")
            places[place.key] = place
    return places, metadata


def by_model_name(places: dict[str, Place], model, conversions, more_names=()) -> dict[str, Place]:
    """Full name in `model` (on any device), or one of `more_names`, -> the place of its tensor. Where several tensors
    are joined, one of them stands for all; one that is split stands for each part. Other keys keep their names."""
    known = dict.fromkeys((*model.state_dict(), *more_names), True)
    rename, found = key_renamer(model, conversions, known), {}
    for name, place in ((name, place) for key, place in places.items() for name in rename(key)):
        if place.dtype in FLOATS and found.get(name, place).dtype not in FLOATS:
            continue  # of several that are joined, one that is no ordinary weight shows
        found[name] = place
    return found


def check_ordinary(found: dict[str, Place], model, compressed: set[str], parts: tuple[str, ...] = ()) -> None:
    """Checks the tensors that are loaded as they are: those `found` by `by_model_name` whose weight is not
    `compressed`. parts: names of the tensors that may stand for the weight of a linear layer.

    Raises ValueError: an integer or float8 tensor stands where the model has floats, and no scale belongs to it; or the
    checkpoint lacks a parameter of the model. The checkpoint of another class may lack whole parts: heads, poolers.
    """
    tied = {name for pair in (model.all_tied_weights_keys or {}).items() for name in pair}
    ignored = optional_names(model)
    is_same_class = type(model).__name__ in (model.config.architectures or ())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if name in compressed:
            continue
        place = found.get(name)
        if place is not None and tensor.is_floating_point() and place.dtype not in FLOATS:
            raise ValueError(
                f"{place.key} is {place.dtype} {place.shape}, and no scale of the checkpoint belongs to it as its "
                f"quantization_config says: expected one of {list(FLOATS)}"
            )
        if place is not None or name not in parameters or any(re.search(pattern, name) for pattern in ignored):
            continue
        if name in tied and any(other in found for other in tied):
            continue
        if is_same_class or not _is_new_part(name, found, model.base_model_prefix):
            module, _, leaf = name.rpartition(".")
            is_linear = leaf == "weight" and isinstance(model.get_submodule(module), (nn.Linear, Conv1D))
            names = [name, " or ".join(f"{module}.{part}" for part in parts if is_linear and part != leaf)]
            raise ValueError(
                f"the checkpoint has neither {' nor '.join(filter(None, names))}: it is incomplete"
                if all(names)
                else f"the checkpoint has no {name}, which {type(model).__name__} needs: it is incomplete"
            )


def _is_new_part(name: str, found: dict[str, Place], base: str) -> bool:
    """Whether the checkpoint has no tensor of the part of the model that parameter `name` belongs to: its module where
    that is a child of the model or of its base model, else the parent of its module."""
    module = name.rpartition(".")[0]
    parent = module.rpartition(".")[0]
    part = module if parent in ("", base) else parent
    return bool(part) and not any(other.startswith(f"{part}.") for other in found)
