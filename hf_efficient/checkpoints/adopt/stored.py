"""What the files of a checkpoint hold of each weight, known before any of it is loaded."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.checkpoints.headers import FLOATS, Place, by_model_name, check_ordinary, read_headers, wanted
from hf_efficient.checkpoints.saved_tensors import possible_names


SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}  # safetensors' name -> torch's


@dataclass
class StoredWeight:
    """The tensors that stand for the weight of the module `name`: part ("qweight", "scales", ...) -> where it is."""

    name: str
    places: dict[str, Place] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # of the files

    def __contains__(self, part: str) -> bool:
        return part in self.places

    def expect(self, part: str, dtypes, shape) -> Place:
        """The place of `part`. Raises ValueError, naming the tensor and what was expected, unless it has one of
        `dtypes` and `shape` (None: any length there)."""
        if part not in self.places:
            raise ValueError(f"the checkpoint has no {self.name}.{part}, expected {wanted(dtypes, shape)}")
        return self.places[part].expect(dtypes, shape)

    def expect_one(self, part: str, dtypes) -> Place:
        """As `expect`, for a tensor of one element in any number of dimensions."""
        place = self.places.get(part)
        return self.expect(part, dtypes, (1,) * len(place.shape) if place else (1,))

    def read(self, part: str) -> torch.Tensor:
        """The tensor `part`: for small ones that decide how the others are read."""
        return self.places[part].read()


def stored_weights(files, model, foreign, fused, conversions) -> dict[str, StoredWeight]:
    """Module name -> the tensors called `<name>.<part>` in the headers of safetensors `files`, of the weights that
    `foreign` holds, for the linear modules of `model` and those of `fused` (list of `FusedWeight`). conversions: the
    model's own.

    Raises:
        ValueError: as `read_headers` and `check_ordinary`; a module has some of the parts of a weight, which make none;
            or a tensor that belongs to it is not read.
    """
    places, metadata = read_headers(files)
    linears = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    experts = [name for weight in fused for name in weight.linears()]
    tensors = {*foreign.parts, *foreign.unchanged, "weight"}
    known = {f"{name}.{part}": (name, part) for name in (*linears, *experts) for part in tensors}
    ours = set(possible_names(model))
    others = {f"{name}.{part}": name for name, _ in model.named_modules() for part in foreign.parts}
    found = by_model_name(places, model, conversions, {**dict.fromkeys(ours), **others, **known})
    if stray := sorted(ours & set(found) - set(known)):  # it would be loaded in the place of what is made of the parts
        raise ValueError(f"{found[stray[0]].key} is no tensor of this format, expected {list(foreign.parts)}")
    stored = {}
    for full, place in found.items():
        if full in known:
            name, part = known[full]
            stored.setdefault(name, StoredWeight(name, metadata=metadata[place.file])).places[part] = place
    for full in sorted(set(found) & set(others) - set(known) - set(model.state_dict())):
        kind = type(model.get_submodule(others[full])).__name__
        raise ValueError(f"{found[full].key} belongs to a quantized weight, but {others[full]} is a {kind}")
    held = {name: weight for name, weight in stored.items() if foreign.holds(weight)}
    _check_unread(places, held, foreign, model)
    for name in sorted(set(stored) - set(held)):
        _check_dense(stored[name], foreign)
    if held:
        joined = {f"{w.module}.{w.parameter}" for w in fused if any(name in stored for name in w.linears())}
        check_ordinary(found, model, {f"{name}.weight" for name in held} | joined, foreign.parts[:3])
    return held


def _check_dense(weight: StoredWeight, foreign) -> None:
    """Raises ValueError unless the weight is one ordinary tensor."""
    place = weight.places.get("weight")
    if place is not None and place.dtype not in FLOATS:
        raise ValueError(
            f"{place.key} is {place.dtype} {place.shape}, but {weight.name} has no scale: expected one of "
            f"{list(foreign.parts)} beside it, or one of {list(FLOATS)}"
        )
    if stray := sorted(set(weight.places) - {"weight"}):
        missing = "no weight" if place is None else "an ordinary weight"
        raise ValueError(
            f"{weight.places[stray[0]].key} belongs to a quantized weight, but {weight.name} has {missing} and not "
            f"all of {list(foreign.parts)[:4]}"
        )


def _check_unread(places: dict[str, Place], held: dict[str, StoredWeight], foreign, model) -> None:
    """Raises ValueError where one of `places` belongs to a module of `held` and is read by nothing: neither a part, nor
    a parameter of the module, nor a bias of zeros, which some libraries write for every layer."""
    owners = {
        place.key.removesuffix(f".{part}"): weight
        for weight in held.values()
        for part, place in weight.places.items()
        if place.key.endswith(f".{part}")
    }
    modules, read = dict(model.named_modules()), {*foreign.parts, *foreign.unchanged, *foreign.unread}
    for key, place in places.items():
        owner, _, part = key.rpartition(".")
        while owner and owner not in owners:
            owner, _, name = owner.rpartition(".")
            part = f"{name}.{part}"
        if not owner or part in read:
            continue
        module = modules.get(owners[owner].name)
        if getattr(module, part, None) is not None or (part == "bias" and not place.read().any()):
            continue
        raise ValueError(
            f"{key} is {place.dtype} {place.shape}, which hf_efficient does not read: expected of a quantized weight "
            f"are {list(foreign.parts)[:4]}" + (" and, in this model, no bias" if part == "bias" else "")
        )
