"""The quantizer that loads checkpoints of other libraries into our layers."""

import torch

from hf_efficient.checkpoints.adopt.experts import CanonicalExperts, fused_weights
from hf_efficient.checkpoints.adopt.foreign import Foreign
from hf_efficient.checkpoints.adopt.schemes import describe
from hf_efficient.checkpoints.adopt.stored import stored_weights
from hf_efficient.checkpoints.saved_tensors import as_saved
from hf_efficient.integrations.transformers_compat import conversions_of, loaded_dtype
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.integrations.transformers_releases import uncast
from hf_efficient.integrations.transformers_weight_conversions import (
    OnArrival,
    converter,
    declared_dtype,
    patterns,
    single,
)


class AdoptingQuantizer(EfficientQuantizer):
    """Reads a checkpoint whose `quantization_config` is another library's. The model it loads is one of ours: it
    computes, dequantizes and saves as if we had quantized it."""

    def __init__(self, foreign: Foreign, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.foreign, self._dequantizes = foreign, bool(getattr(quantization_config, "dequantize", False))

    def validate_environment(self, *args, **kwargs):
        pass

    def before_loading(self, model, files, device_map=None):
        foreign, conversions = self.foreign, conversions_of(model)
        foreign.prepare(model)
        fused = fused_weights(model, conversions)
        experts = [name for weight in fused for name in weight.linears()]
        stored = stored_weights(files, model, foreign, fused, conversions)
        if not stored:
            raise ValueError(
                f"the checkpoint holds no weight of {type(model).__name__} as its quantization_config says: it has "
                f"none of {list(foreign.parts)} of a linear layer"
            )
        with torch.device("cpu"):  # a model is made on the meta device, of which nothing can be read
            self._fused = [weight for weight in fused if any(name in stored for name in weight.linears())]
            self.quantization_config = describe(model, foreign, stored, self._fused)
        self.quantization_config.dequantize = self._dequantizes
        model.quantization_method = self.quantization_config.quant_method
        super().before_loading(model, files, device_map)
        expected = (set(stored) - set(experts)) | {weight.module for weight in self._fused}
        if different := {name.rpartition(".")[0] for name in self.swapped.weights} ^ expected:
            raise ValueError(
                f"{min(different)} is quantized in the checkpoint, but {type(model).__name__} keeps it in an ordinary "
                "form"
            )

    def update_weight_conversions(self, conversions, model):
        self._joined = [weight.converter for weight in self._fused]
        targets = {weight.target for weight in self._fused}
        names = [name for name in self.swapped.weights if name.endswith(".weight")]
        operations = {  # of fused weights, one for each pattern of names
            weight.target: CanonicalExperts(self, weight.parts(self.foreign.parts)) for weight in self._fused
        }
        for leaf in sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names}):
            parts = {rf"\b{leaf}\.{part.replace('.', chr(92) + '.')}$": part for part in self.foreign.parts}
            operations[f"{leaf}.weight"] = CanonicalOnArrival(self, parts)
        kept = [c for c in conversions if not targets & set(patterns(c)[1])]
        return kept + [converter(list(operation.parts), target, operation) for target, operation in operations.items()]

    def canonical(
        self, name: str, tensors: dict[str, torch.Tensor], format, dtype, *shape: int
    ) -> dict[str, torch.Tensor]:
        """{part: tensor} of the weight `name` [N, K] of a model that computes in `dtype` -> its canonical tensors,
        checked.
        shape: N, K. Raises ValueError naming the weight."""
        try:
            for part, tensor in tensors.items():
                is_float = tensor.is_floating_point() and part not in self.foreign.codes
                if is_float and not tensor.float().isfinite().all():
                    raise ValueError(f"{part} holds NaN or infinity")
            found = uncast(self.foreign.convert(tensors, *shape, format, dtype), format.dtypes(dtype))
            format.check(found, shape[1])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self.heap.count(sum(tensor.nbytes for tensor in tensors.values()))
        return {part: found[part].contiguous() for part in format.shapes(*shape)}

    def after_loading(self, model):
        if missing := sorted(set(self.swapped.weights) - self.arrived):
            raise ValueError(
                f"no tensors of the checkpoint were loaded as {missing[:3]}, of {len(missing)} quantized weights"
            )
        super().after_loading(model)


class CanonicalOnArrival(OnArrival):
    """{pattern: tensor} of one module -> what its parameters are to be, by full name. parts: {pattern: part}."""

    def __init__(self, quantizer: AdoptingQuantizer, parts: dict[str, str]):
        super().__init__(quantizer)
        self.parts = parts

    @torch.no_grad()
    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        quantizer, name = self.hf_quantizer, full_layer_name
        tensors = {self.parts[pattern]: single(tensor) for pattern, tensor in input_dict.items()}
        dtype = loaded_dtype(model, name, declared_dtype(model, name))
        if name not in quantizer.swapped.weights:
            return {name: tensors["weight"].to(dtype)}
        weight, transposed = quantizer.swapped.weights[name]
        parts = quantizer.canonical(name, tensors, weight.format, dtype, weight.out_features, weight.in_features)
        quantizer.arrived.add(name)
        if quantizer.quantization_config.dequantize:
            dense = weight.format.dequantize(parts, weight.in_features, dtype)
            return {name: dense.t().contiguous() if transposed else dense}
        return as_saved(name, weight, parts, dtype)
