"""E2M1 codes with a scale a block, as compressed-tensors' "nvfp4-pack-quantized" and "mxfp4-pack-quantized": the layout
that `checkpoints/adopt/compressed_tensors_fp4.py` describes."""

import torch

from hf_efficient.checkpoints.export.source import Layer
from hf_efficient.formats.codebook import FP4_BLOCKS, CodebookFormat


def is_fp4(format) -> bool:
    """Whether weights of `format` are written so."""
    return isinstance(format, CodebookFormat) and format.codebook in FP4_BLOCKS


def scheme(format: CodebookFormat) -> dict:
    """The `weights` of a group of the config."""
    kind = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "group_size": format.group_size}
    if format.codebook == "mxfp4":
        return {**kind, "strategy": "group", "scale_dtype": "torch.uint8"}
    return {**kind, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}


def tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """Tensors by their names in the module."""
    parts = {"weight_packed": layer.read("qweight"), "weight_scale": layer.read("scale_codes")}
    if layer.weight.format.codebook == "nvfp4":
        scale = layer.read("scale_scale")
        parts["weight_global_scale"] = torch.where(scale == 0, 1, scale).reciprocal()  # 0: of a weight of zeros
    return parts
