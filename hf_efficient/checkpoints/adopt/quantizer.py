"""The quantizer that loads checkpoints of other libraries into our layers."""

from collections import Counter

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, _IdentityOp
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import get_module_from_name

from hf_efficient import configs
from hf_efficient.checkpoints.adopt.experts import CanonicalExperts, FusedWeight, converters, fused_weights
from hf_efficient.checkpoints.adopt.foreign import Foreign
from hf_efficient.checkpoints.adopt.stored import StoredWeight, stored_weights
from hf_efficient.experts import is_fused_experts
from hf_efficient.integrations.transformers_dtypes import loaded_dtype
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.layers import PLACEHOLDER_SHAPE


class AdoptingQuantizer(EfficientQuantizer):
    """Reads a checkpoint whose `quantization_config` is another library's. The model it loads is one of ours: it computes,
    dequantizes and saves as if we had quantized it."""

    def __init__(self, foreign: Foreign, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self._foreign, self._dequantizes = foreign, bool(getattr(quantization_config, "dequantize", False))

    def validate_environment(self, *args, **kwargs):
        pass

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        foreign, conversions = self._foreign, get_model_conversion_mapping(model)
        fused = fused_weights(model, conversions)
        experts = [name for weight in fused for name in weight.linears()]
        stored = stored_weights(checkpoint_files, model, foreign, fused, conversions)
        if not stored:
            raise ValueError(
                f"the checkpoint holds no weight of {type(model).__name__} as its quantization_config says: it has none of "
                f"{list(foreign.parts)} of a linear layer"
            )
        with torch.device("cpu"):  # a model is made on the meta device, of which nothing can be read
            self._fused = [weight for weight in fused if any(name in stored for name in weight.linears())]
            self.quantization_config = describe(model, foreign, stored, self._fused)
        self.quantization_config.dequantize = self._dequantizes
        model.quantization_method = self.quantization_config.quant_method
        super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)
        expected = (set(stored) - set(experts)) | {weight.module for weight in self._fused}
        if different := {name.rpartition(".")[0] for name in self._weights} ^ expected:
            raise ValueError(
                f"{min(different)} is quantized in the checkpoint, but {type(model).__name__} keeps it in an ordinary form"
            )
        self._arrived = set()

    def update_weight_conversions(self, weight_conversions, model):
        self._expert_conversions = [weight.converter for weight in self._fused]
        targets = {weight.converter._original_target_patterns[0] for weight in self._fused}
        leaves = sorted(
            {name.removesuffix(".weight").rpartition(".")[2] for name in self._weights if name.endswith(".weight")}
        )
        new = converters(self._fused, self)
        for leaf in leaves:
            parts = {rf"\b{leaf}\.{part.replace('.', chr(92) + '.')}$": part for part in self._foreign.parts}
            new.append(WeightConverter(list(parts), f"{leaf}.weight", [CanonicalOnArrival(self, parts)]))
        kept = [c for c in weight_conversions if not targets & set(c._original_target_patterns)]
        return kept + new

    def canonical(self, name: str, tensors: dict[str, torch.Tensor], format, *shape: int) -> dict[str, torch.Tensor]:
        """{part: tensor} of the weight `name` [N, K] -> its canonical tensors, checked. Raises ValueError naming the weight."""
        try:
            for part, tensor in tensors.items():
                if tensor.is_floating_point() and not tensor.float().isfinite().all():
                    raise ValueError(f"{part} holds NaN or infinity")
            found = self._foreign.convert(tensors, *shape, format)
            format.check(found, shape[1])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self._heap.count(sum(tensor.nbytes for tensor in tensors.values()))
        return {part: found[part].contiguous() for part in format.shapes(*shape)}

    def _process_model_after_weight_loading(self, model, **kwargs):
        if missing := sorted(set(self._weights) - self._arrived):
            raise ValueError(
                f"no tensors of the checkpoint were loaded as {missing[:3]}, of {len(missing)} quantized weights"
            )
        model._weight_conversions = [
            c
            for c in model._weight_conversions or []
            if not any(isinstance(op, (CanonicalOnArrival, CanonicalExperts)) for op in getattr(c, "operations", ()))
        ]
        return super()._process_model_after_weight_loading(model, **kwargs)


def describe(model, foreign: Foreign, stored: dict[str, StoredWeight], fused: list[FusedWeight]):
    """Our config for the modules `stored` of the checkpoint: the commonest scheme, overrides for the others."""
    modules = dict(model.named_modules())
    schemes = {}
    for name, weight in stored.items():
        if module := modules.get(name):
            shape = (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
            schemes[name] = foreign.scheme(weight, *shape, module.weight.dtype)
    for weight in fused:
        dtype = getattr(modules[weight.module], weight.parameter).dtype
        for name in weight.linears():
            own = foreign.scheme(stored.get(name, StoredWeight(name)), weight.rows, weight.shape[2], dtype)
            format = getattr(configs, foreign.config)(**own).format()
            if own != schemes.setdefault(weight.module, own) or not all(
                shape[0] == weight.rows or part == "input_order"
                for part, shape in format.shapes(weight.rows, weight.shape[2]).items()
            ):
                raise ValueError(
                    f"{name} is {format}, expected the scheme of {weight.linears()[0]}, with scales of its own for each row: the "
                    "experts of a layer are computed together"
                )
    return config_of(model, foreign.config, schemes)


def config_of(model, config_name: str, schemes: dict[str, dict]):
    """The config of ours called `config_name` that gives each module of `schemes` its scheme and leaves all others."""
    kind = getattr(configs, config_name)
    own = {name: kind(**scheme).scheme() for name, scheme in schemes.items()}
    counts = Counter(map(repr, own.values()))
    common = max(own.values(), key=lambda scheme: counts[repr(scheme)])
    overrides = {
        name: {field: value for field, value in scheme.items() if value != common[field]}
        for name, scheme in own.items()
        if scheme != common
    }
    head = model.get_output_embeddings()
    heads = {name for name, module in model.named_modules() if head is not None and module is head}
    kept = {key.removesuffix(".weight").removesuffix(".bias") for key in get_keys_to_not_convert(model)}
    excluded = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, (nn.Linear, Conv1D)) or is_fused_experts(module))
        and name not in schemes
        and not any(configs.module_matches(pattern, name) for pattern in kept)
    ]
    return kind(
        **common,
        overrides=overrides,
        modules_to_not_convert=excluded or None,
        quantize_lm_head=bool(heads & set(schemes)),
    )


class CanonicalOnArrival(ConversionOps):
    """{pattern: [tensor]} of one module -> what its parameters are to be, by full name."""

    def __init__(self, quantizer: AdoptingQuantizer, parts: dict[str, str]):
        self.hf_quantizer, self.parts = quantizer, parts

    def __deepcopy__(self, memo):
        return self  # transformers copies it for every weight

    @torch.no_grad()
    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        quantizer, name = self.hf_quantizer, full_layer_name
        tensors = {self.parts[p]: t[0] if isinstance(t, list) else t for p, t in input_dict.items()}
        module, leaf = get_module_from_name(model, name)
        dtype = loaded_dtype(model, name, getattr(module, leaf).dtype)
        if name not in quantizer._weights:
            return {name: tensors["weight"].to(dtype)}
        weight, transposed = quantizer._weights[name]
        parts = quantizer.canonical(name, tensors, weight.format, weight.out_features, weight.in_features)
        quantizer._arrived.add(name)
        if quantizer.quantization_config.dequantize:
            dense = weight.format.dequantize(parts, weight.in_features, dtype)
            return {name: dense.t().contiguous() if transposed else dense}
        base = name.removesuffix("weight")
        placeholder = next(iter(parts.values())).new_zeros(PLACEHOLDER_SHAPE, dtype=dtype)
        return {name: placeholder, **{base + part: tensor for part, tensor in parts.items()}}

    @property
    def reverse_op(self):
        return _IdentityOp()
