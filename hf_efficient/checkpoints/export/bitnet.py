"""The layout of transformers' `BitNetQuantConfig` (https://arxiv.org/abs/2402.17764), which transformers reads without
this package."""

import torch

from hf_efficient.checkpoints.export.folder import FolderTarget
from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.formats.ternary import TernaryFormat


class BitNet(FolderTarget):
    """ "autobitlinear", "offline": `weight` uint8 [N / 4, K], whose bits 2 i and 2 i + 1 in row r are 1 + the weight of
    row r + i * N / 4, and `weight_scale` [1], in the dtype of the model, which the product is multiplied with."""

    def __init__(self, source: Source):
        self.source = source
        for layer in source.layers:
            if reason := self._why_not(layer):
                raise ValueError(f"format='bitnet' cannot hold {layer.name}: {reason}")
        own = getattr(source.config, "quantization_config", None)
        own = own if isinstance(own, dict) else own.to_dict()
        self.eps = own.get("rms_norm_eps")

    def _why_not(self, layer: Layer) -> str | None:
        format = layer.weight.format
        if not isinstance(format, TernaryFormat):
            return f"{format} is not ternary: make the model with BitNetConfig or hf_efficient.to_bitnet"
        if format.per_channel:
            return "it has a scale for each row, and the layout one for each weight: leave out per_channel"
        if layer.transposed or layer.weight.experts is not None:
            return "the layout has ordinary linear layers only"
        if layer.weight.out_features % 4:
            return f"its {layer.weight.out_features} rows are no multiple of 4, which share a byte"
        return None

    def engines(self):
        return ("transformers",)

    def quantization_config(self):
        return {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "use_rms_norm": self.eps is not None,
            "rms_norm_eps": self.eps or 1e-6,
            "modules_to_not_convert": self.source.kept or ["lm_head"],
        }

    def tensors(self, layer):
        weight = layer.weight
        codes = weight.format.unpack(layer.read("qweight"), weight.in_features)
        packed = sum(part << 2 * i for i, part in enumerate(codes.chunk(4)))
        scale = layer.read("scale").flatten()
        stored = scale.to(self.source.dtype)
        change = ((stored.float() - scale).abs() / scale.clamp_min(torch.finfo(torch.float32).tiny)).max().item()
        self.rounding = max(self.rounding, change)
        return {"weight": packed.to(torch.uint8), "weight_scale": stored}
