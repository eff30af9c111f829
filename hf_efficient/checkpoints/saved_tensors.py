"""The tensors that a saved checkpoint of ours must hold, checked before any weight is read."""

import json
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.checkpoints.headers import FLOATS, Place, by_model_name, check_ordinary, read_headers
from hf_efficient.experts import expert_weight_names, is_fused_experts
from hf_efficient.layers import PLACEHOLDER_SHAPE, CompressedModule, CompressedWeight


DTYPES = {  # torch's -> safetensors'
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
PARTS = (  # every canonical tensor of any format
    *("qweight", "scale", "zero_point", "minimum", "codebook", "scale_codes", "scale_scale", "scale_mean"),
    *("activation_scale", "activation_zero_point", "outlier_columns", "outlier_weight"),
    *("input_order", "input_scale", "rotation_signs", "bitmap", "places"),
    *("factors", "salient", "values", "magnitude", "group_bits"),
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ANY_FLOAT = torch.float64  # passed to a format as the dtype of the weight, to tell which tensors follow it


def part_name(name: str, weight: CompressedWeight, part: str) -> str:
    """Full name of the canonical tensor `part` ("qweight", "scale", "zero_point") of the weight called `name`."""
    return (name.removesuffix("weight") if weight.experts is None else name + "_") + part


def as_saved(name: str, weight: CompressedWeight, parts: dict[str, torch.Tensor], dtype) -> dict[str, torch.Tensor]:
    """Canonical tensors of the weight called `name` -> what a checkpoint holds of it by full name, the placeholder in
    `dtype` among them."""
    placeholder = parts["qweight"].new_zeros(PLACEHOLDER_SHAPE, dtype=dtype)
    return {name: placeholder, **{part_name(name, weight, part): tensor for part, tensor in parts.items()}}


def check(files, weights: dict[str, tuple[CompressedWeight, bool]], conversions, model) -> dict[str, str]:
    """Compares safetensors `files` with what `weights` (full name -> weight) and the rest of `model` need, before any
    weight is loaded: names, shapes and dtypes of all tensors, and the values of those that codes are computed with.

    Returns:
        Full name of a canonical tensor -> its dtype in the files, in safetensors' words; none for files=None, a state
        dict that the caller made.

    Raises:
        ValueError: tensors are missing, are too many, or have another shape or dtype; or values that the format does
            not hold. Names them.
    """
    if files is None:
        return {}
    places, _ = read_headers(files)
    found = by_model_name(places, model, conversions, possible_names(model))
    expected = {
        part_name(name, weight, part): (name, part, shape)
        for name, (weight, _) in weights.items()
        for (part, parameter), shape in zip(weight.names().items(), weight.shapes().values())
    }
    missing = sorted({*expected, *weights} - set(found))
    if missing:
        raise ValueError(
            f"the quantized checkpoint lacks {len(missing)} of {len(expected) + len(weights)} tensors that its "
            f"quantization_config promises, for example {missing[:3]}: it is incomplete, or its config is that of "
            "another model"
        )
    wrong = [
        f"{name}: {found[name].shape} instead of {tuple(shape)}"
        for name, (_, _, shape) in expected.items()
        if found[name].shape != tuple(shape)
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors of the quantized checkpoint do not have the shape that its quantization_config and "
            f"architecture give, for example {'; '.join(wrong[:3])}"
        )
    _check_strays(found, expected, weights, model)
    _check_dtypes(found, expected, weights, places)
    check_ordinary(found, model, {*expected, *weights})
    _check_values(found, weights, model)
    return {name: found[name].dtype for name in expected}


def check_loaded(weights: dict[str, tuple[CompressedWeight, bool]], model) -> None:
    """Checks the canonical tensors of `weights` in `model`, which were loaded from a state dict and no files.

    Raises:
        ValueError: the state dict lacked one of them or the weight's placeholder; or one has another dtype, or values
            that the format does not hold. Names it.
    """
    for name, (weight, _) in weights.items():
        placeholder = model.get_parameter(name)
        found = {part: model.get_parameter(part_name(name, weight, part)) for part in weight.names()}
        dtypes = weight.format.dtypes(_ANY_FLOAT)
        for part, tensor in {"": placeholder, **found}.items():
            full = part_name(name, weight, part) if part else name
            if not getattr(tensor, "_is_hf_initialized", False):
                raise ValueError(f"the state dict has no {full}, which the quantization_config promises")
            expected = dtypes.get(part, _ANY_FLOAT)
            if tensor.dtype is not expected and not (expected is _ANY_FLOAT and tensor.dtype in _FLOATS):
                raise ValueError(f"{full} is {tensor.dtype}, expected {'floats' if expected in _FLOATS else expected}")
        if not placeholder.is_meta:  # offloaded
            parts = {part: tensor for part, tensor in found.items() if part != "qweight" or weight.format.checks_codes}
            _check_parts(name, weight, parts, placeholder.dtype)


def possible_names(model) -> list[str]:
    """Full names of all canonical tensors that linear layers, embeddings and experts of `model` might have."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
            names += [f"{name}.{part}" for part in PARTS]
        elif isinstance(module, CompressedModule):
            names += [f"{name}.{w.prefix}{part}" for w in module.compressed_weights() for part in PARTS]
        elif is_fused_experts(module):
            names += [f"{name}.{weight}_{part}" for weight in expert_weight_names(module) for part in PARTS]
    return names


def _check_strays(found, expected, weights, model) -> None:
    own = {*expected, *model.state_dict()}
    stray = sorted(name for name in set(possible_names(model)) & set(found) - own)
    if stray:
        raise ValueError(
            f"the checkpoint holds {len(stray)} tensors that its quantization_config has no place for, for example "
            f"{stray[:3]}: its config is that of another checkpoint"
        )
    for name in weights:
        found[name].expect(FLOATS, PLACEHOLDER_SHAPE, ", since the quantization_config says that it is quantized")


def _check_dtypes(found: dict[str, Place], expected, weights, places) -> None:
    in_weight_dtype = {}  # dtype of the placeholder -> names of the tensors of the weight's dtype
    for name, (owner, part, _) in expected.items():
        dtype = weights[owner][0].format.dtypes(_ANY_FLOAT)[part]
        found[name].expect(FLOATS if dtype is _ANY_FLOAT else (DTYPES[dtype],))
        if dtype is _ANY_FLOAT:
            in_weight_dtype.setdefault(found[owner].dtype, []).append(name)
    for kept, names in in_weight_dtype.items():
        (usual, _), *others = Counter(found[name].dtype for name in names).most_common()
        if others:
            name = next(name for name in names if found[name].dtype != usual)
            raise ValueError(f"{name} is {found[name].dtype}, where tensors of other weights in {kept} are {usual}")
    for file in {place.file for place in places.values()}:
        config = Path(file).with_name("config.json")
        saved = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        dtype = DTYPES.get(getattr(torch, str(saved.get("dtype") or saved.get("torch_dtype")), None))
        held = {place.dtype for place in places.values()}
        if dtype in FLOATS and dtype not in held:
            raise ValueError(f"{config} says dtype={saved.get('dtype')!r}, but no tensor is {dtype}: {sorted(held)}")


def _check_values(found: dict[str, Place], weights, model) -> None:
    opened = {}
    for name, (weight, _) in weights.items():
        format, dtype = weight.format, model.get_parameter(name).dtype
        parts = [part for part in weight.names() if part != "qweight" or format.checks_codes]
        _check_parts(name, weight, {part: found[part_name(name, weight, part)].read(opened) for part in parts}, dtype)


def _check_parts(name: str, weight: CompressedWeight, tensors: dict[str, torch.Tensor], dtype) -> None:
    """Raises ValueError, naming the weight called `name`, where its canonical `tensors` hold values that the format
    does not, in a model of `dtype`."""
    try:
        for part, tensor in tensors.items():
            if weight.format.dtypes(_ANY_FLOAT)[part] is _ANY_FLOAT and not tensor.to(dtype).isfinite().all():
                raise ValueError(f"{part} holds values that are not finite in {str(dtype).removeprefix('torch.')}")
        weight.format.check(tensors, weight.in_features)
    except ValueError as error:
        raise ValueError(f"{name.removesuffix('.weight')}: {error}") from None
