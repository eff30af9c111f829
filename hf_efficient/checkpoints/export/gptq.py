"""The layout of GPTQ checkpoints (AutoGPTQ, GPTQModel). GPTQModel and, through it, transformers read all of it; vLLM
reads symmetric 4 and 8 bits."""

import re

import torch

from hf_efficient.checkpoints.export import grid
from hf_efficient.checkpoints.export.engines import GPTQ_SCHEMES, SERVERS, is_served
from hf_efficient.checkpoints.export.folder import FolderTarget
from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.kernels.linear.codes import pack_codes


BITS = (2, 3, 4, 8)


class Gptq(FolderTarget):
    """Codes packed along in_features, "qweight" int32 [K * bits / 32, N]; "qzeros" int32 [G, N * bits / 32]; "scales"
    float16 [G, N]; "g_idx" int32 [K], the group of every column. The first version of the layout stores zero points
    less one; where one is zero, which it cannot, this is "gptq_v2". So it is for 3 bits, whose zero points GPTQModel
    reads in another order of bits before version 7."""

    def __init__(self, source: Source):
        self.bits = next((getattr(layer.weight.format, "bits", None) for layer in source.layers), None)
        grid.check_layers(source, "gptq", self._why_not)
        self.group = grid.common_group(source.layers)
        self.symmetric = all(layer.weight.format.symmetric for layer in source.layers)
        stored = [layer for layer in source.layers if not layer.weight.format.symmetric]
        self.first_version = self.bits != 3 and all(layer.read("zero_point").min() > 0 for layer in stored)
        self.head = any(layer.name == "lm_head" for layer in source.layers)
        self.kept = [name for name in source.kept if name != "lm_head"]

    def _why_not(self, layer: Layer) -> str | None:
        if reason := grid.affine_only(layer, BITS):
            return reason
        if layer.weight.format.bits != self.bits:
            return f"weights of {layer.weight.format.bits} bits beside layers of {self.bits}; this target has one width"
        for name, width in (("in_features", layer.weight.in_features), ("out_features", layer.weight.out_features)):
            if width * self.bits % 32:
                return f"{name}={width} codes of {self.bits} bits do not fill words of 32 bits"
        return None

    def engines(self):
        served = is_served(GPTQ_SCHEMES, self.bits, self.symmetric, self.group)
        return (*(SERVERS if served else ()), "GPTQModel", "transformers")

    def quantization_config(self):
        config = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.symmetric,
            "desc_act": False,
            "lm_head": self.head,
            "checkpoint_format": "gptq" if self.first_version else "gptq_v2",
            "pack_dtype": "int32",
        }
        if self.kept:
            config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in self.kept}
        return config

    def tensors(self, layer):
        weight, format = layer.weight, layer.weight.format
        scale, zero = (grid.per_group(layer, part, self.group) for part in ("scale", "zero_point"))
        self.rounding = max(self.rounding, grid.rounding_of(scale, format.levels, zero))
        if self.first_version:
            zero = zero - 1
        group = weight.in_features if self.group == -1 else self.group
        return {
            "qweight": grid.words(layer.read("qweight"), weight.in_features * self.bits // 32).t(),
            "qzeros": grid.words(pack_codes(zero.t().contiguous(), self.bits), weight.out_features * self.bits // 32),
            "scales": grid.as_float16(layer, scale).t(),
            "g_idx": torch.arange(weight.in_features, dtype=torch.int32) // group,
        }
