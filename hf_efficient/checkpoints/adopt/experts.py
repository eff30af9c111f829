"""Experts that a checkpoint holds as linear layers of their own, each quantized, and that transformers fuses."""

from dataclasses import dataclass

import torch

from hf_efficient.checkpoints.saved_tensors import as_saved
from hf_efficient.experts import expert_weight_names, is_fused_experts
from hf_efficient.integrations.transformers_weight_conversions import OnArrival, declared_dtype, patterns


@dataclass(frozen=True)
class FusedWeight:
    """A weight [E, N, K] of an experts module.

    Args:
        module, parameter: their names.
        prefix: what stands before the patterns in the checkpoint.
        converter: transformers' conversion that fuses ordinary weights. Each of its sources (patterns with one expert
            for each *) holds N / len(sources) rows.
        shape: E, N, K.
    """

    module: str
    parameter: str
    prefix: str
    converter: object
    shape: tuple[int, int, int]

    @property
    def sources(self) -> list[str]:
        return [source.removesuffix(".weight") for source in patterns(self.converter)[0]]

    @property
    def target(self) -> str:
        return patterns(self.converter)[1][0]

    @property
    def rows(self) -> int:
        """Of one source."""
        return self.shape[1] // len(self.sources)

    def linears(self) -> list[str]:
        """Full names of the checkpoint's linear layers."""
        experts = range(self.shape[0])
        return [self.prefix + source.replace("*", str(expert)) for source in self.sources for expert in experts]

    def parts(self, names: tuple[str, ...]) -> dict[str, tuple[int, str]]:
        """Pattern of a tensor -> (index of its source, which of the parts called `names` it is)."""
        return {f"{source}.{part}": (index, part) for index, source in enumerate(self.sources) for part in names}


def fused_weights(model, conversions) -> list[FusedWeight]:
    """The weights of experts that `conversions` fuse of linear layers."""
    found = []
    for name, module in model.named_modules():
        if not is_fused_experts(module) or module.is_transposed:
            continue
        for parameter in expert_weight_names(module):
            full = f"{name}.{parameter}"
            for conversion in conversions:
                sources, targets = patterns(conversion)
                if not hasattr(conversion, "operations") or len(targets) != 1 or not full.endswith(targets[0]):
                    continue
                if all(source.count("*") == 1 and source.endswith(".weight") for source in sources):
                    shape = tuple(getattr(module, parameter).shape)
                    found.append(FusedWeight(name, parameter, full.removesuffix(targets[0]), conversion, shape))
    return found


class CanonicalExperts(OnArrival):
    """{pattern: [tensor of each expert]} of one fused weight -> what its parameters are to be, by full name.

    parts: of `FusedWeight`.
    """

    def __init__(self, quantizer, parts: dict[str, tuple[int, str]]):
        super().__init__(quantizer)
        self.parts = parts

    @torch.no_grad()
    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        quantizer, name = self.hf_quantizer, full_layer_name
        weight, _ = quantizer.swapped.weights[name]
        dtype = declared_dtype(model, name)
        sources = 1 + max(index for index, _ in self.parts.values())
        shape = weight.out_features // sources, weight.in_features
        each = []
        for expert in range(weight.experts):
            pieces = []
            for source in range(sources):
                own = {self.parts[p][1]: t[expert] for p, t in input_dict.items() if self.parts[p][0] == source}
                pieces.append(quantizer.canonical(f"{name}[{expert}]", own, weight.format, dtype, *shape))
            each.append({part: _joined(part, [piece[part] for piece in pieces], name) for part in pieces[0]})
        quantizer.arrived.add(name)
        parts = {part: torch.stack([tensors[part] for tensors in each]) for part in each[0]}
        if quantizer.quantization_config.dequantize:
            return {name: weight.format.dequantize(parts, weight.in_features, dtype)}
        return as_saved(name, weight, parts, dtype)


def _joined(part: str, tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """The canonical tensor `part` of sources whose rows follow each other."""
    if part != "input_order":
        return torch.cat(tensors)
    if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
        raise ValueError(f"{name}: its parts have inputs in different orders, expected the same g_idx")
    return tensors[0]
