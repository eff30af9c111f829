"""The conversions that transformers applies to weights as it loads them, for the quantizers of this package."""

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, _IdentityOp

from hf_efficient.integrations import transformers_tensor_parallel as tensor_parallel
from hf_efficient.integrations.transformers_releases import keep_dtypes, longest_first, quantizer_base  # noqa: F401


HfQuantizer = quantizer_base()


class OnArrival(ConversionOps):
    """A conversion of {pattern: tensor or [tensor]} while a model is loaded, for a quantizer. Nothing is undone when
    the model is saved."""

    def __init__(self, quantizer=None):
        self.hf_quantizer = quantizer

    def __deepcopy__(self, memo):
        return self  # transformers copies it for every weight

    @property
    def reverse_op(self):
        return _IdentityOp()


def single(tensor: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """The tensor of a pattern that stands for one."""
    return tensor[0] if isinstance(tensor, list) else tensor


def declared_dtype(model, name: str) -> torch.dtype:
    """The dtype that the tensor called `name` has in the model before it is loaded."""
    module, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(module), leaf).dtype


def converter(sources: str | list[str], target: str, operation: OnArrival) -> WeightConverter:
    """Has transformers give the tensors whose names match `sources` to `operation`, which makes those of `target`."""
    return WeightConverter(longest_first(sources), target, [operation])


def patterns(conversion) -> tuple[list[str], list[str]]:
    """(source patterns, target patterns) of a conversion, as they were written."""
    return conversion._original_source_patterns, conversion._original_target_patterns


def joining(conversions, names) -> list[WeightConverter]:
    """Those of `conversions` that split one of the weights called `names` when the model is saved."""
    return [
        c
        for c in conversions
        if isinstance(c, WeightConverter)
        and any(c.reverse_transform().rename_source_key(name)[1] is not None for name in names)
    ]


def forget(model, joined=()) -> None:
    """Makes the model be saved with the tensors that it has: drops what was done while it was loaded and the
    conversions `joined`, which would split what is no longer a weight. As of 5.24 a model that was made dense has none:
    transformers drops them, and saves by those of the model's class."""
    if not hasattr(model, "_weight_conversions"):
        return
    targets = [patterns(conversion)[1] for conversion in joined]
    model._weight_conversions = [
        c
        for c in model._weight_conversions or []
        if not any(isinstance(operation, OnArrival) for operation in getattr(c, "operations", ()))
        and not (isinstance(c, WeightConverter) and patterns(c)[1] in targets)
    ]


def remember(model, joined: list) -> None:
    """Takes `forget(model, joined)` back."""
    model._weight_conversions = (getattr(model, "_weight_conversions", None) or []) + joined


class Resave(OnArrival):
    """Changes nothing; its presence makes transformers write an offloaded weight anew."""

    def convert(self, input_dict, target_patterns=None, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))}


class QuantizeOnArrival(OnArrival):
    """Replaces each weight of {full name: tensor} by its quantized tensors."""

    @torch.no_grad()
    def convert(self, input_dict, model=None, **kwargs):
        quantizer, out = self.hf_quantizer, {}
        for name in list(input_dict):
            tensor = single(input_dict.pop(name))  # and forget it: peak memory is the quantized model and one weight
            for own in quantizer.stands_for(name):
                if quantizer.on_arrival(own):
                    config = quantizer.quantization_config.for_module(own.rpartition(".")[0])
                    out.update(tensor_parallel.own_parts(model, quantizer.quantize(own, tensor, config)))
                else:  # what is to be calibrated is written to: an untied output embedding needs its own memory
                    out[own] = tensor if own == name else tensor.clone()
            del tensor
        return out


def dequantizer(quantizer, model, leaf: str) -> WeightConverter:
    """Collects the tensors that stand for a weight called `leaf` and makes the weight of them. A parameter of the dense
    `model` that is called as one of them (`router.scale` of Gemma 4) is none."""
    prefix = "" if leaf == "weight" else leaf + "_"
    parts = [prefix + part for part in quantizer.parts()]
    owners = {name.split(".")[-2] for name in model.state_dict() if "." in name and name.rpartition(".")[2] in parts}
    others = "".join(rf"(?<!\.{owner})(?<!^{owner})" for owner in sorted(owners))
    sources = [rf"\.{leaf}", *(rf"{others}\.{part}" for part in parts)]
    return converter(sources, f".{leaf}", _DequantizeOnArrival(quantizer))


class _DequantizeOnArrival(OnArrival):
    """The tensors of one weight -> the weight in the dtype its parameter has."""

    @torch.no_grad()
    def convert(self, input_dict, target_patterns=None, full_layer_name=None, model=None, **kwargs):
        dtype, weights = declared_dtype(model, full_layer_name), self.hf_quantizer.swapped.weights
        names = {pattern.rpartition(".")[2]: single(tensor) for pattern, tensor in input_dict.items()}
        if full_layer_name not in weights:
            return {target_patterns[0]: next(iter(names.values())).to(dtype)}
        weight, transposed = weights[full_layer_name]
        found = {part: names[parameter] for part, parameter in weight.names().items()}
        dense = weight.format.dequantize(found, weight.in_features, dtype)
        return {target_patterns[0]: dense.transpose(-1, -2).contiguous() if transposed else dense}
