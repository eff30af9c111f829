"""What the files of a checkpoint hold of each weight, known before any of it is loaded."""

from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D


FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}  # of a scale: safetensors' name -> torch's


@dataclass
class Place:
    """A tensor in a file; dtype in safetensors' words."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class StoredWeight:
    """The tensors that stand for the weight of the module `name`: part ("qweight", "scales", ...) -> where it is."""

    name: str
    places: dict[str, Place] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # of the files

    def __contains__(self, part: str) -> bool:
        return part in self.places

    def expect(self, part: str, dtypes, shape) -> Place:
        """The place of `part`. Raises ValueError, naming the tensor and what was expected, unless it has one of `dtypes` and
        `shape` (None: any length there)."""
        place = self.places.get(part)
        wanted = f"{' or '.join(dtypes)} {tuple('any' if n is None else n for n in shape)}"
        if place is None:
            raise ValueError(f"the checkpoint has no {self.name}.{part}, expected {wanted}")
        fits = len(place.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, place.shape))
        if place.dtype not in dtypes or not fits:
            raise ValueError(f"{place.key} is {place.dtype} {place.shape}, expected {wanted}")
        return place

    def expect_one(self, part: str, dtypes) -> Place:
        """As `expect`, for a tensor of one element in any number of dimensions."""
        place = self.places.get(part)
        return self.expect(part, dtypes, (1,) * len(place.shape) if place else (1,))

    def read(self, part: str) -> torch.Tensor:
        """The tensor `part`: for small ones that decide how the others are read."""
        place = self.places[part]
        with safe_open(place.file, framework="pt") as opened:
            return opened.get_tensor(place.key)


def stored_weights(files, model, parts, experts: list[str], conversions) -> dict[str, StoredWeight]:
    """Module name -> the tensors called `<name>.<part>` (or weight) in the headers of safetensors `files`, for the linear
    modules of `model` and those called `experts`, which it has fused. conversions: the model's own.

    Raises:
        ValueError: a file is no (whole) safetensors file (pickles are not read), or one of the modules has no tensor.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        names = [str(file).rpartition("/")[2] for file in files or ()][:3]
        raise ValueError(
            f"hf_efficient reads quantized checkpoints from safetensors files, not from {names}: others can run code when "
            "they are opened; save the checkpoint again with safetensors"
        )
    linears = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    known = {f"{name}.{part}": (name, part) for name in (*linears, *experts) for part in {*parts, "weight"}}
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                for key in opened.keys():
                    renamed, _ = rename_source_key(key, renamings, [], model.base_model_prefix, known)
                    if renamed in known:
                        name, part = known[renamed]
                        piece = opened.get_slice(key)
                        weight = found.setdefault(name, StoredWeight(name))
                        weight.places[part] = Place(file, key, piece.get_dtype(), tuple(piece.get_shape()))
                        weight.metadata = metadata
        except SafetensorError as error:
            raise ValueError(f"{file} is not a safetensors file that can be read: {error}") from None
    made = [target for c in conversions if isinstance(c, WeightConverter) for target in c.target_patterns]
    inside = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix or "-") else ""
    for name in linears:
        key = f"{name}.weight"
        if name.startswith(inside) and name not in found and key not in model.all_tied_weights_keys:
            if found and not any(target in key for target in made):
                raise ValueError(
                    f"the checkpoint has neither {key} nor {' or '.join(f'{name}.{part}' for part in parts[:3])}"
                )
    return found
