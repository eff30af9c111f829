"""Models of ours written as bitsandbytes checkpoints; `hf_efficient.adopt("bitsandbytes")` is the way back."""

import copy
import json
import os
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.checkpoints.adopt.bitsandbytes import INVERSE_127, STATE, swap_halves
from hf_efficient.files import atomic_checkpoint
from hf_efficient.formats.codebook import TABLES, CodebookFormat
from hf_efficient.formats.w8a8 import Int8Format
from hf_efficient.layers import CompressedModule, EfficientLinear


BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # codes that share a scale: what bitsandbytes' kernels know


def save_as_bitsandbytes(model, folder: str | os.PathLike) -> None:
    """Writes `model` into `folder` as bitsandbytes would save it: config, safetensors and generation config,
    atomically.

    Supported are `WeightOnlyConfig(bits=4, codebook="nf4" or "fp4", group_size=64, 128, ... 4096)` with groups that
    divide the rows, value for value; and `W8A8Config` in int8 with methods "absmax" or "llm_int8" and one dynamic scale
    per row, whose values bitsandbytes rounds once more. Scales of `double_quantization` are written in float32.

    Raises:
        ValueError: a model without quantized layers, or with a layer of another kind; names it.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, CompressedModule)}
    kinds = {name: _kind(name, module) for name, module in layers.items()}
    if len(set(kinds.values())) != 1:
        raise ValueError(
            f"a bitsandbytes checkpoint has layers of one kind, {type(model).__name__} has "
            f"{sorted(set(kinds.values())) or 'none'}"
        )
    kind = next(iter(kinds.values()))
    tensors = {}
    for name, tensor in model.state_dict().items():
        module = name.rpartition(".")[0]
        if module not in layers or name.endswith(".bias"):
            tensors[name] = tensor
    for name, module in layers.items():
        parts = _int8(module) if kind == "int8" else _four_bits(module, kind)
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    for tied in model.all_tied_weights_keys:
        tensors.pop(tied, None)
    config = copy.deepcopy(model.config)
    config.quantization_config = _config(model, layers, kind)
    with atomic_checkpoint(Path(os.path.abspath(os.fspath(folder)))) as new:
        config.save_pretrained(new)
        if model.can_generate():
            model.generation_config.save_pretrained(new)
        save_torch_state_dict(tensors, new, metadata={"format": "pt"})


def _kind(name: str, module: CompressedModule) -> str:
    """ "nf4", "fp4" or "int8", or ValueError."""
    format = getattr(module, "format", None)
    if isinstance(module, EfficientLinear) and isinstance(format, CodebookFormat) and format.codebook in ("nf4", "fp4"):
        size = module.in_features if format.group_size == -1 else format.group_size
        if size in BLOCKS and module.in_features % size == 0:
            return format.codebook
    if isinstance(module, EfficientLinear) and isinstance(format, Int8Format):
        plain = not (format.zero_point or format.asymmetric or format.static or format.outlier_columns)
        if plain and format.per_channel:
            return "int8"
    described = format or "experts"
    raise ValueError(
        f"{name} is {described}, which bitsandbytes cannot hold: it holds nf4 and fp4 in groups of {BLOCKS} that "
        "divide the rows, and int8 with one scale a row and dynamic inputs, of linear layers"
    )


def _four_bits(module: EfficientLinear, table: str) -> dict[str, torch.Tensor]:
    canonical, format = module.canonical(), module.format
    state = {
        "quant_type": table,
        "blocksize": module.in_features if format.group_size == -1 else format.group_size,
        "dtype": str(module.weight.dtype).removeprefix("torch."),
        "shape": [module.out_features, module.in_features],
    }
    return {
        "weight": swap_halves(canonical["qweight"]).view(-1, 1),
        "weight.absmax": format.scale(canonical).flatten(),
        "weight.quant_map": torch.tensor(TABLES[table], dtype=torch.float32),
        f"{STATE}{table}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _int8(module: EfficientLinear) -> dict[str, torch.Tensor]:
    canonical = module.canonical()
    scale = (canonical["scale"].double() / INVERSE_127).float().flatten()
    return {"weight": canonical["qweight"], "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _config(model, layers, kind: str) -> dict:
    skipped = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and name not in layers]
    config = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": skipped, "load_in_8bit": kind == "int8"}
    if kind == "int8":
        threshold = next(iter(layers.values())).format.outlier_threshold
        return {**config, "llm_int8_threshold": threshold or 0.0}
    dtype = str(next(iter(layers.values())).weight.dtype).removeprefix("torch.")
    return {**config, "load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_compute_dtype": dtype}
