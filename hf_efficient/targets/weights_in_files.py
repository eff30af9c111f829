"""Which tensors the files of a checkpoint of this package have for each weight, read from headers before loading."""

from dataclasses import dataclass, field

from hf_efficient.checkpoints.headers import read_headers
from hf_efficient.integrations.transformers_compat import conversions_of, key_renamer, round_trip
from hf_efficient.layers import PLACEHOLDER_SHAPE


_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


@dataclass
class WeightsInFiles:
    """Names of weights, such as "<module>.weight" and "<experts>.gate_up_proj".

    Args:
        compressed: each with the name of its module in the files.
        dense: the others.
        integers: those of `dense` that are no floats.
    """

    compressed: dict[str, str] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)
    integers: set[str] = field(default_factory=set)


def weights_in_files(files, model, names: list[str]) -> WeightsInFiles | None:
    """What safetensors `files` hold of the weights called `names`, or None where there are none or other files. Raises
    ValueError as `read_headers`."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    codes = {
        (name.removesuffix("weight") if name.endswith(".weight") else f"{name}_") + "qweight": name for name in names
    }
    known = {**dict.fromkeys(model.state_dict(), True), **codes, **{name: name for name in names}}
    rename, held = key_renamer(model, conversions_of(model), known, joins=False), WeightsInFiles()
    for key, place in read_headers(files)[0].items():
        (renamed,) = rename(key)
        name = known.get(renamed)
        if not isinstance(name, str):
            continue
        if renamed in codes or place.shape == PLACEHOLDER_SHAPE:
            held.compressed[name] = key.rpartition(".")[0]
        else:
            held.dense.add(name)
            held.integers |= {name} if place.dtype in _INTEGERS else set()
    return held


def lost_when_saved(model, modules: list[str]) -> set[str]:
    """Those of the linear `modules` whose codes transformers would not find again. It renames what it saves and loads;
    of some architectures `<module>.weight` gets its name back and `<module>.qweight` does not."""
    again = round_trip(model)
    weights = {name: f"{name}.weight" for name in modules}
    returning = [name for name, weight in weights.items() if again(weight) == weight]
    return {name for name in returning if again(f"{name}.qweight") != f"{name}.qweight"}
