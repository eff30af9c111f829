"""Experts that a checkpoint holds as linear layers of their own, each quantized, and that transformers fuses."""

from dataclasses import dataclass

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, _IdentityOp

from hf_efficient.experts import expert_weight_names, is_fused_experts
from hf_efficient.layers import PLACEHOLDER_SHAPE


@dataclass(frozen=True)
class FusedWeight:
    """A weight [E, N, K] of an experts module, of which each of the checkpoint's `sources` (patterns, one expert for each *) holds
    N / len(sources) rows; `prefix` stands before the patterns, `converter` is what fuses ordinary weights."""

    module: str
    parameter: str
    prefix: str
    converter: WeightConverter
    shape: tuple[int, int, int]

    @property
    def sources(self) -> list[str]:
        return [source.removesuffix(".weight") for source in self.converter._original_source_patterns]

    @property
    def rows(self) -> int:
        """Of one source."""
        return self.shape[1] // len(self.sources)

    def linears(self) -> list[str]:
        """Full names of the checkpoint's linear layers."""
        experts = range(self.shape[0])
        return [self.prefix + source.replace("*", str(expert)) for source in self.sources for expert in experts]


def fused_weights(model, conversions) -> list[FusedWeight]:
    """The weights of experts that `conversions` fuse of linear layers."""
    found = []
    for name, module in model.named_modules():
        if not is_fused_experts(module) or module.is_transposed:
            continue
        for parameter in expert_weight_names(module):
            full = f"{name}.{parameter}"
            for converter in conversions:
                if not isinstance(converter, WeightConverter) or len(converter._original_target_patterns) != 1:
                    continue
                target, sources = converter._original_target_patterns[0], converter._original_source_patterns
                if full.endswith(target) and all(s.count("*") == 1 and s.endswith(".weight") for s in sources):
                    shape = tuple(getattr(module, parameter).shape)
                    found.append(FusedWeight(name, parameter, full.removesuffix(target), converter, shape))
    return found


def converters(fused: list[FusedWeight], quantizer) -> list[WeightConverter]:
    """What makes canonical tensors of the quantized linear layers, one for each pattern of names."""
    new = {}
    for weight in fused:
        target = weight.converter._original_target_patterns[0]
        if target not in new:
            parts = {
                f"{source}.{part}": (index, part)
                for index, source in enumerate(weight.sources)
                for part in quantizer._foreign.parts
            }
            new[target] = WeightConverter(list(parts), target, [CanonicalExperts(quantizer, parts)])
    return list(new.values())


class CanonicalExperts(ConversionOps):
    """{pattern: [tensor of each expert]} of one fused weight -> what its parameters are to be, by full name."""

    def __init__(self, quantizer, parts: dict[str, tuple[int, str]]):
        self.hf_quantizer, self.parts = quantizer, parts

    def __deepcopy__(self, memo):
        return self

    @torch.no_grad()
    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        quantizer, name = self.hf_quantizer, full_layer_name
        weight, _ = quantizer._weights[name]
        sources = 1 + max(index for index, _ in self.parts.values())
        rows = weight.out_features // sources
        each = []
        for expert in range(weight.experts):
            pieces = []
            for source in range(sources):
                own = {self.parts[p][1]: t[expert] for p, t in input_dict.items() if self.parts[p][0] == source}
                pieces.append(quantizer.canonical(f"{name}[{expert}]", own, weight.format, rows, weight.in_features))
            each.append({part: self._joined(part, [piece[part] for piece in pieces], name) for part in pieces[0]})
        quantizer._arrived.add(name)
        parts = {part: torch.stack([tensors[part] for tensors in each]) for part in each[0]}
        dtype = model.get_parameter(name).dtype
        if quantizer.quantization_config.dequantize:
            return {name: weight.format.dequantize(parts, weight.in_features, dtype)}
        placeholder = parts["qweight"].new_zeros(PLACEHOLDER_SHAPE, dtype=dtype)
        return {name: placeholder, **{f"{name}_{part}": tensor for part, tensor in parts.items()}}

    @staticmethod
    def _joined(part: str, tensors: list[torch.Tensor], name: str) -> torch.Tensor:
        if part != "input_order":
            return torch.cat(tensors)
        if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
            raise ValueError(f"{name}: its parts have inputs in different orders, expected the same g_idx")
        return tensors[0]

    @property
    def reverse_op(self):
        return _IdentityOp()
