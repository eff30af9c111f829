"""What `EfficientQuantizer` has transformers do to weights on their way into a model: compress them, expand them, or keep them."""

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, _IdentityOp
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_efficient.integrations import transformers_tensor_parallel as tensor_parallel


class Resave(ConversionOps):
    """Changes nothing; its presence makes transformers write an offloaded weight anew."""

    def convert(self, input_dict, target_patterns=None, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))}

    @property
    def reverse_op(self):
        return _IdentityOp()


class QuantizeOnArrival(ConversionOps):
    """Replaces each weight of {full name: tensor} by its quantized tensors."""

    def __init__(self, quantizer):
        self.hf_quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict, model=None, **kwargs):
        quantizer, out = self.hf_quantizer, {}
        for name in list(input_dict):
            tensor = input_dict.pop(name)  # and forget it: peak memory is the quantized model and one weight
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if quantizer._tied_head is not None and name == quantizer._tied_head[0]:
                out[name] = tensor
                name = quantizer._tied_head[1]
            if quantizer.on_arrival(name):
                config = quantizer.quantization_config.for_module(name.rpartition(".")[0])
                out.update(tensor_parallel.own_parts(model, quantizer.quantize(name, tensor, config)))
            else:
                out[name] = tensor
            del tensor
        return out

    @property
    def reverse_op(self):
        return _IdentityOp()


def dequantizer(quantizer, leaf: str) -> WeightConverter:
    """Collects the tensors that stand for a weight called `leaf` and makes the weight of them."""
    prefix = "" if leaf == "weight" else leaf + "_"
    sources = [rf"\.{name}" for name in (leaf, *(prefix + part for part in quantizer.parts()))]
    return WeightConverter(sources, f".{leaf}", [_DequantizeOnArrival(quantizer)])


class _DequantizeOnArrival(ConversionOps):
    """{pattern: [tensor]} of one weight -> the weight in the dtype its parameter has."""

    def __init__(self, quantizer):
        self.hf_quantizer = quantizer

    @torch.no_grad()
    def convert(
        self, input_dict, source_patterns=None, target_patterns=None, full_layer_name=None, model=None, **kwargs
    ):
        module, leaf = get_module_from_name(model, full_layer_name)
        dtype = getattr(module, leaf).dtype
        parts = {pattern: t[0] if isinstance(t, list) else t for pattern, t in input_dict.items()}
        names = {pattern.rpartition(".")[2]: tensor for pattern, tensor in parts.items()}
        if full_layer_name not in self.hf_quantizer._weights:
            return {target_patterns[0]: next(iter(parts.values())).to(dtype)}
        weight, transposed = self.hf_quantizer._weights[full_layer_name]
        found = {part: names[parameter] for part, parameter in weight.names().items()}
        dense = weight.format.dequantize(found, weight.in_features, dtype)
        return {target_patterns[0]: dense.transpose(-1, -2).contiguous() if transposed else dense}

    @property
    def reverse_op(self):
        return _IdentityOp()
