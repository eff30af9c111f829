"""The "gemm" layout of AutoAWQ checkpoints, which vLLM, SGLang, TGI and transformers read."""

import torch

from hf_efficient.checkpoints.export import grid
from hf_efficient.checkpoints.export.engines import SERVERS
from hf_efficient.checkpoints.export.folder import FolderTarget
from hf_efficient.checkpoints.export.source import Layer, Source
from hf_efficient.kernels.linear.codes import pack_codes


BITS = 4
PER_WORD = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbouring columns stands in which place of a word


class Awq(FolderTarget):
    """Codes packed along out_features, eight in a word: "qweight" int32 [K, N / 8], "qzeros" int32 [G, N / 8],
    "scales" float16 [G, N]. The layout always has zero points: those of symmetric weights are 8."""

    def __init__(self, source: Source):
        grid.check_layers(source, "awq", self._why_not)
        self.group = grid.common_group(source.layers)
        self.kept = source.kept

    @staticmethod
    def _why_not(layer: Layer) -> str | None:
        if reason := grid.affine_only(layer, (BITS,)):
            return reason
        if layer.name.rpartition(".")[2] == "lm_head":
            return "the output embedding, which readers of this target never take as quantized"
        if layer.weight.out_features % PER_WORD:
            return f"out_features={layer.weight.out_features} is not a multiple of {PER_WORD}"
        return None

    def engines(self):
        return (*SERVERS, "GPTQModel", "transformers")

    def quantization_config(self):
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": self.kept,
        }

    def tensors(self, layer):
        format = layer.weight.format
        scale, zero = (grid.per_group(layer, part, self.group) for part in ("scale", "zero_point"))
        self.rounding = max(self.rounding, grid.rounding_of(scale, format.levels, zero))
        codes = format.unpack(layer.read("qweight"), layer.weight.in_features)
        return {
            "qweight": _interleaved(codes),
            "qzeros": _interleaved(zero),
            "scales": grid.as_float16(layer, scale).t(),
        }


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [N, M] -> int32 [M, N / 8]."""
    eights = codes.t().unflatten(1, (-1, PER_WORD))[..., list(ORDER)].flatten(1)
    return grid.words(pack_codes(eights.contiguous(), BITS), codes.shape[0] // PER_WORD)
