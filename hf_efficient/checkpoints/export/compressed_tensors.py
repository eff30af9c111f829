"""The layout of the package compressed-tensors, which vLLM, SGLang, TGI and transformers read."""

import json

import torch

from hf_efficient.checkpoints.export import fp4_blocks
from hf_efficient.checkpoints.export.engines import PACKED_SCHEMES, SERVERS, is_served
from hf_efficient.checkpoints.export.folder import FolderTarget
from hf_efficient.checkpoints.export.grid import affine_only, check_layers, common_group, per_group, words
from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format
from hf_efficient.kernels.linear.codes import pack_codes


BITS = (2, 4, 8)  # the layout of 3 bits differs between releases of the package


class CompressedTensors(FolderTarget):
    """Weights of 2, 4 and 8 bits as "pack-quantized", `W8A8Config` as "int-quantized" and "float-quantized", FP4 as
    "nvfp4-pack-quantized" and "mxfp4-pack-quantized". vLLM wants 4 bits or symmetric 8 bits in groups of 32, 64 or 128
    or per channel, and symmetric int8 weights. transformers reads all of it, packed zero points only with
    dequantize=True."""

    def __init__(self, source: Source):
        check_layers(source, "compressed-tensors", _why_not)
        self.kept = source.kept
        formats = [layer.weight.format for layer in source.layers]
        self.has_symmetric_int8 = not any(isinstance(each, Int8Format) and each.zero_point for each in formats)
        self.has_fp4 = any(map(fp4_blocks.is_fp4, formats))
        grids = {}  # (bits, symmetric) -> layers: one group size for all, since readers know one scheme best
        for layer in source.layers:
            if isinstance(layer.weight.format, AffineFormat):
                grids.setdefault(_grid(layer), []).append(layer)
        self.group_sizes = {grid: common_group(layers) for grid, layers in grids.items()}
        self.groups = {}  # scheme as JSON -> names of its layers
        for layer in source.layers:
            scheme = {"weights": self._weights(layer), "input_activations": _inputs(layer), "format": _format(layer)}
            self.groups.setdefault(json.dumps(scheme), []).append(layer.name)

    def engines(self):
        served = self.has_symmetric_int8 and not self.has_fp4  # which vLLM runs on GPUs only: never tried here
        served = served and all(is_served(PACKED_SCHEMES, *grid, group) for grid, group in self.group_sizes.items())
        return (*(SERVERS if served else ()), "transformers")

    def quantization_config(self):
        schemes = [json.loads(scheme) for scheme in self.groups]
        formats = {scheme["format"] for scheme in schemes}
        if len(formats) == 1:  # releases before 0.11 know the format of the whole only
            schemes = [{key: value for key, value in scheme.items() if key != "format"} for scheme in schemes]
        targets = [["Linear"]] if len(schemes) == 1 else list(self.groups.values())
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": {"targets": names, **scheme}
                for index, (names, scheme) in enumerate(zip(targets, schemes))
            },
            "ignore": self.kept,
        }

    def tensors(self, layer):
        format = layer.weight.format
        if fp4_blocks.is_fp4(format):
            return fp4_blocks.tensors(layer)
        if not isinstance(format, AffineFormat):
            return _eight_bits(layer)
        rows, columns = layer.weight.out_features, layer.weight.in_features
        group = self.group_sizes[_grid(layer)]
        tensors = {
            "weight_packed": words(layer.read("qweight"), -(-columns * format.bits // 32)),
            "weight_scale": per_group(layer, "scale", group),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not format.symmetric:
            zero = pack_codes(per_group(layer, "zero_point", group).t().contiguous(), format.bits)
            tensors["weight_zero_point"] = words(zero, -(-rows * format.bits // 32)).t().contiguous()
        return tensors

    def _weights(self, layer: Layer) -> dict:
        format = layer.weight.format
        if fp4_blocks.is_fp4(format):
            return fp4_blocks.scheme(format)
        if not isinstance(format, AffineFormat):
            return _weights_of_8_bits(format)
        group = self.group_sizes[_grid(layer)]
        where = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        return {"num_bits": format.bits, "type": "int", "symmetric": format.symmetric, "dynamic": False, **where}


def _why_not(layer: Layer) -> str | None:
    format = layer.weight.format
    if isinstance(format, AffineFormat):
        return affine_only(layer, BITS)
    if fp4_blocks.is_fp4(format):
        rest = layer.weight.in_features % format.group_size
        return f"rows of {layer.weight.in_features} are no multiple of {format.group_size}" if rest else None
    if format.outlier_columns or getattr(format, "outlier_threshold", None) is not None:
        return "outlier columns in 16 bits (method='llm_int8')"
    if isinstance(format, Float8Format) and format.is_e5m2:
        return "weights in float8 E5M2, where the format has E4M3"
    if isinstance(format, Float8Format) and format.weights == "block" and layer.weight.in_features % BLOCK:
        return f"blocks of {BLOCK} columns for a row of {layer.weight.in_features}, which they do not divide"
    return None


def _format(layer: Layer) -> str:
    if fp4_blocks.is_fp4(layer.weight.format):
        return f"{layer.weight.format.codebook}-pack-quantized"
    kinds = {AffineFormat: "pack-quantized", Int8Format: "int-quantized", Float8Format: "float-quantized"}
    return kinds[type(layer.weight.format)]


def _grid(layer: Layer) -> tuple[int, bool]:
    return layer.weight.format.bits, layer.weight.format.symmetric


def _weights_of_8_bits(format) -> dict:
    if isinstance(format, Int8Format):
        where = {"strategy": "channel" if format.per_channel else "tensor"}
        return {"num_bits": 8, "type": "int", "symmetric": not format.zero_point, "dynamic": False, **where}
    where = {"strategy": format.weights}
    if format.weights == "block":
        where["block_structure"] = [BLOCK, BLOCK]
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **where}


def _inputs(layer: Layer) -> dict | None:
    format = layer.weight.format
    if isinstance(format, AffineFormat) or fp4_blocks.is_fp4(format):
        return None
    where = {"strategy": "tensor" if format.static else "token", "dynamic": not format.static}
    if isinstance(format, Int8Format):
        return {"num_bits": 8, "type": "int", "symmetric": not format.asymmetric, **where}
    if format.weights == "block":
        where = {"strategy": "group", "group_size": BLOCK, "dynamic": True}
    return {"num_bits": 8, "type": "float", "symmetric": True, **where}


def _eight_bits(layer: Layer) -> dict[str, torch.Tensor]:
    format = layer.weight.format
    per_tensor = not format.per_channel if isinstance(format, Int8Format) else format.weights == "tensor"
    shaped = (lambda values: values.flatten()) if per_tensor else (lambda values: values)
    tensors = {"weight": layer.read("qweight"), "weight_scale": shaped(layer.read("scale"))}
    if getattr(format, "zero_point", False):
        tensors["weight_zero_point"] = shaped(layer.read("zero_point"))
    for part in format.activation_tensors:
        tensors[part.replace("activation", "input")] = layer.read(part)
    return tensors
