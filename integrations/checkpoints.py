"""Saved checkpoints: what must be in one before it is read."""

from safetensors import safe_open
from transformers.core_model_loading import WeightRenaming, rename_source_key

from hf_efficient.layers import CompressedWeight


def part_name(name: str, weight: CompressedWeight, part: str) -> str:
    """Full name of the canonical tensor `part` ("qweight", "scale", "zero_point") of the weight called `name`."""
    return (name.removesuffix("weight") if weight.experts is None else name + "_") + part


def check(files, weights: dict[str, tuple[CompressedWeight, bool]], conversions, model) -> None:
    """Compares the headers of safetensors `files` with the tensors that `weights` (full name -> weight) need.

    Raises:
        ValueError: tensors are missing or have another shape; names them, before any weight is read.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    expected = {}
    for name, (weight, _) in weights.items():
        for parameter, shape in weight.shapes().items():
            expected[part_name(name, weight, parameter.removeprefix(weight.prefix))] = shape
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():
                renamed, _ = rename_source_key(key, renamings, [], model.base_model_prefix, expected)
                if renamed in expected:
                    found[renamed] = tuple(opened.get_slice(key).get_shape())
    missing = sorted(set(expected) - set(found))
    if missing:
        raise ValueError(
            f"the quantized checkpoint lacks {len(missing)} of {len(expected)} tensors that its quantization_config "
            f"promises, for example {missing[:3]}: it is incomplete, or its config is that of another model"
        )
    wrong = [f"{k}: {found[k]} instead of {tuple(shape)}" for k, shape in expected.items() if found[k] != tuple(shape)]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors of the quantized checkpoint do not have the shape that its quantization_config and "
            f"architecture give, for example {'; '.join(wrong[:3])}"
        )
