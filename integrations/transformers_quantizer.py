"""The quantizer that transformers' `from_pretrained`, `save_pretrained` and `dequantize` call for our configs."""

import copy

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, auto
from transformers.quantizers.base import get_keys_to_not_convert

from hf_efficient.configs import (
    BitNetConfig,
    CompressionConfig,
    SparseConfig,
    W8A8Config,
    WeightOnlyConfig,
    module_matches,
)
from hf_efficient.experts import (
    EfficientExperts,
    compress_experts,
    decompress_experts,
    expert_weight_names,
    is_fused_experts,
)
from hf_efficient.integrations import calibrated_loading, checkpoints, saving, transformers_bitnet
from hf_efficient.integrations import transformers_tensor_parallel as tensor_parallel
from hf_efficient.integrations.heap import HeapTrimmer
from hf_efficient.integrations.transformers_weight_conversions import QuantizeOnArrival, Resave, dequantizer
from hf_efficient.layers import PLACEHOLDER_SHAPE, CompressedModule, CompressedWeight, EfficientLinear


CONFIGS = (WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig)


def register() -> None:
    """Registers the configs and the quantizer with transformers, and lets `from_pretrained(quantization_config=...)` ask
    for `dequantize=True` on a quantized checkpoint, which transformers allows a closed tuple of configs. Idempotent."""
    for config in CONFIGS:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[config.name] = config
        auto.AUTO_QUANTIZER_MAPPING[config.name] = EfficientQuantizer
        if config not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
            auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (config,)
    transformers_bitnet.register()
    tensor_parallel.register()


class EfficientQuantizer(HfQuantizer):
    """Swaps modules on the meta device, quantizes each weight as it arrives, and derives the layouts the device reads."""

    requires_calibration = False
    is_trainable = True  # adapters; the compressed weights are frozen

    def __init__(self, quantization_config, **kwargs):
        # A copy: calibration writes into it, and the caller's stays as it is
        super().__init__(copy.copy(quantization_config), **kwargs)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model by itself: not with experts, which read token counts back."""
        return all(weight.experts is None for weight, _ in self._weights.values())

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args, **kwargs):
        if self.quantization_config.dequantize and not self.pre_quantized:
            raise ValueError(
                "dequantize=True is for a checkpoint that is already quantized: this one is not; drop the argument, or "
                "call model.dequantize() after loading"
            )
        asked, own = getattr(self.quantization_config, "asked_for", None), self.quantization_config.scheme()
        if asked not in (None, own) and not self.quantization_config.dequantize:
            raise ValueError(
                f"the checkpoint is pruned already ({own}) and cannot be pruned again ({asked}): load it without a "
                "quantization_config, or prune the model it was made from"
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, device_map=None, **kwargs):
        tensor_parallel.check(model, self.quantization_config, self.pre_quantized, type(self) is EfficientQuantizer)
        self._checkpoint_files, self._uses_device_map = checkpoint_files, device_map is not None
        self._arrived, self._tied_head, self._heap = set(), None, HeapTrimmer()
        # of a checkpoint of transformers' BitNetQuantConfig, the modules that it holds in ternary form
        self._is_bitnet = getattr(self.quantization_config, "source", None) is not None
        ternary = transformers_bitnet.settle_modules(self.quantization_config, model) if self._is_bitnet else None
        self._prepare_head(model)
        self._weights = {}  # full name of a weight -> (CompressedWeight, whether the original is transposed)
        self._plan = {}  # full name of a module that is compressed after loading -> its config
        dequantize = self.pre_quantized and self.quantization_config.dequantize
        for name, module, config in self._targets(model):
            if not self.pre_quantized and config.needs_calibration():
                self._plan[name] = config
            stays_dense = dequantize or name in self._plan
            format = config.format()
            if isinstance(module, (nn.Linear, Conv1D)):
                transposed = isinstance(module, Conv1D)
                width = (module.nx, module.nf) if transposed else (module.in_features, module.out_features)
                has_bias, dtype = module.bias is not None, module.weight.dtype
                weight = CompressedWeight("", width[1], width[0], format)
                self._weights[f"{name}.weight"] = _checked(name, weight), transposed
                if not stays_dense:
                    new = EfficientLinear(*width, has_bias, format, dtype, "meta", transposed)
                    model.set_submodule(name, new)
            else:
                shapes = {p: getattr(module, p).shape for p in expert_weight_names(module)}
                for parameter, (experts, rows, columns) in shapes.items():
                    n, k = (columns, rows) if module.is_transposed else (rows, columns)
                    weight = CompressedWeight(parameter + "_", n, k, format, experts)
                    self._weights[f"{name}.{parameter}"] = _checked(name, weight), module.is_transposed
                if not stays_dense:
                    compress_experts(module, format)
        kind = type(self.quantization_config).__name__
        if not self._weights:
            raise ValueError(
                f"{type(model).__name__} has no weight that {kind}(modules_to_not_convert="
                f"{self.quantization_config.modules_to_not_convert}, overrides={self.quantization_config.overrides}) "
                "would compress: it needs nn.Linear, Conv1D or fused expert weights that are not excluded"
            )
        if self._is_bitnet:
            transformers_bitnet.check_targets(self, ternary)
        transformers_bitnet.attach_norms(self, model)
        if self._plan:
            calibrated_loading.prepare(self.quantization_config, self._plan, device_map, model.name_or_path)

    def update_parallel_plan(self, model, plan):
        if plan is model.tp_plan:
            tensor_parallel.update_plan(model, plan, self._plan)

    def _prepare_head(self, model) -> None:
        """Names what is kept by default; unties an output embedding that is to be quantized."""
        kept = {key.removesuffix(".weight").removesuffix(".bias") for key in get_keys_to_not_convert(model)}
        kept |= set(model._keep_in_fp32_modules or ()) | set(model._keep_in_fp32_modules_strict or ())
        head = model.get_output_embeddings()
        if self.quantization_config.quantize_lm_head:
            if head is None and self.pre_quantized:  # the base model of a checkpoint that has one
                self._kept = kept
                return
            if head is None:
                raise ValueError(f"quantize_lm_head=True, but {type(model).__name__} has no output embedding")
            name = next(n for n, module in model.named_modules() if module is head)
            if f"{name}.weight" in model.all_tied_weights_keys and isinstance(self.quantization_config, SparseConfig):
                raise ValueError(
                    f"quantize_lm_head=True is not supported: the output embedding {name} of {type(model).__name__} is tied "
                    "to the input embedding, which is not pruned; it must be False"
                )
            source = model.all_tied_weights_keys.pop(f"{name}.weight", None)
            if source is not None:
                kept.discard(source.removesuffix(".weight"))
                self._tied_head = source, f"{name}.weight"
                for config in (model.config, model.config.get_text_config()):
                    config.tie_word_embeddings = False
            kept.discard(name)
        self._kept = kept

    def _targets(self, model) -> list[tuple[str, nn.Module, CompressionConfig]]:
        """(name, module, its config) of everything to quantize."""
        config, targets = self.quantization_config, []
        excluded = list(config.modules_to_not_convert or ())
        names = [name for name, _ in model.named_modules() if name]
        if not self.pre_quantized:
            for argument, patterns in (("modules_to_not_convert", excluded), ("overrides", config.overrides)):
                for pattern in patterns:
                    if not any(module_matches(pattern, name) for name in names):
                        raise ValueError(
                            f"{argument}: {pattern!r} matches no module of {type(model).__name__}; names look like "
                            f"{[n for n, m in model.named_modules() if type(m) is nn.Linear][:3]}"
                        )
        base = (
            model.base_model_prefix
        )  # a base model is read from the checkpoint of one with a head: names there begin so
        inside = f"{base}." if self.pre_quantized and base and not hasattr(model, base) else ""
        for name, module in model.named_modules():
            if any(name == kept or module_matches(kept, name) for kept in self._kept):
                continue
            if any(module_matches(pattern, inside + name) for pattern in excluded):
                continue
            own = config.for_module(inside + name)
            if own is None:
                continue
            if type(module) in (nn.Linear, Conv1D) or is_fused_experts(module):
                targets.append((name, module, own))
            elif any(p.ndim == 3 for p in module.parameters(recurse=False)) and "Experts" in type(module).__name__:
                raise ValueError(
                    f"{name} ({type(module).__name__}) holds expert weights in a form that {type(config).__name__} cannot "
                    f"quantize; to leave them as they are, pass modules_to_not_convert=[{name.split('.')[-1]!r}]"
                )
        return targets

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        if self.pre_quantized:
            return False
        return self.on_arrival(param_name) or (self._tied_head is not None and param_name == self._tied_head[0])

    def on_arrival(self, name: str) -> bool:
        """Whether `name` is a weight that is quantized as it is loaded."""
        return name in self._weights and name.rpartition(".")[0] not in self._plan

    def get_quantize_ops(self) -> ConversionOps:
        return QuantizeOnArrival(self)

    def quantize(self, name: str, tensor: torch.Tensor, config: CompressionConfig) -> dict[str, torch.Tensor]:
        """The tensors that replace the weight `name`."""
        weight, transposed = self._weights[name]
        dense = tensor.transpose(-1, -2) if transposed else tensor
        try:
            if weight.experts is None:
                parts = config.compress(dense, weight.format)
            else:
                each = [config.compress(expert, weight.format) for expert in dense]
                parts = {part: torch.stack([tensors[part] for tensors in each]) for part in each[0]}
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self._arrived.add(name)
        self._heap.count(tensor.nbytes)
        base = name.removesuffix("weight") if weight.experts is None else name + "_"
        return {name: tensor.new_zeros(PLACEHOLDER_SHAPE), **{base + part: value for part, value in parts.items()}}

    def get_new_dtype(self, converter, param, dtype):
        target = converter.target_patterns[0]
        if target in self._canonical_names():
            return None  # they keep the dtypes that the codes were chosen for
        return super().get_new_dtype(converter, param, dtype)

    def parts(self) -> list[str]:
        """Names of the canonical tensors that any of the weights has."""
        return sorted({part for weight, _ in self._weights.values() for part in weight.names()})

    def _canonical_names(self) -> set[str]:
        if not hasattr(self, "_names"):
            self._names = {
                checkpoints.part_name(name, weight, part)
                for name, (weight, _) in self._weights.items()
                for part in weight.names()
            }
        return self._names

    def update_weight_conversions(self, weight_conversions, model):
        leaves = sorted({name.rpartition(".")[2] for name in self._weights}, key=lambda leaf: leaf != "weight")
        self._expert_conversions = [
            c
            for c in weight_conversions
            if isinstance(c, WeightConverter)
            and any(t.rpartition(".")[2] in leaves and t.rpartition(".")[2] != "weight" for t in c.target_patterns)
        ]
        if self._is_bitnet:
            return transformers_bitnet.conversions(self, model, weight_conversions)
        if self.pre_quantized:
            checkpoints.check(self._checkpoint_files, self._weights, weight_conversions, model)
            if not self.quantization_config.dequantize:
                return weight_conversions
            return weight_conversions + [dequantizer(self, leaf) for leaf in leaves]
        if not self._uses_device_map:
            return weight_conversions
        # A weight that goes to disk is written there again only if a converter made it
        return weight_conversions + [WeightConverter(rf"\.{leaf}", f".{leaf}", [Resave()]) for leaf in leaves]

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._is_bitnet:
            transformers_bitnet.finish(model)
        if self.pre_quantized and self.quantization_config.dequantize:
            return model
        if not self.pre_quantized:
            missing = sorted(set(filter(self.on_arrival, self._weights)) - self._arrived)
            if missing:
                raise ValueError(
                    f"the checkpoint has no weights for {len(missing)} of the {len(self._weights)} weights to quantize, "
                    f"for example {missing[:3]}: is its config that of another architecture?"
                )
        if self._plan:
            calibrated_loading.run(model, self.quantization_config, self._plan)
        is_cut = tensor_parallel.localize(model)
        # Quantized experts are saved as they are, fused; their converters would split what is no longer a weight
        own = (Resave, QuantizeOnArrival)
        model._weight_conversions = [
            c
            for c in model._weight_conversions or []
            if not any(isinstance(op, own) for op in getattr(c, "operations", ()))
            and not any(
                isinstance(c, WeightConverter) and c._original_target_patterns == e._original_target_patterns
                for e in self._expert_conversions
            )
        ]
        for module in model.modules():
            if isinstance(module, CompressedModule):
                for weight in module.compressed_weights():
                    for name in (*weight.names().values(), weight.prefix[:-1] or "weight"):
                        if name in module._parameters:  # calibration has derived layouts already
                            module._parameters[name].requires_grad_(False)
                            self._heap.count(module._parameters[name].nbytes)
                module.derive_layouts(module._parameters[weight.prefix[:-1] or "weight"].dtype)
        self._heap.flush()
        if is_cut:
            tensor_parallel.refuse_saving(model)
            return model
        saving.save_aside_then_move(model)
        if model.can_generate():
            from hf_efficient.integrations.transformers_generation import enable_automatic

            enable_automatic(model)
        return model

    def _dequantize(self, model, dtype=None):
        if transformers_bitnet.has_norms(self.quantization_config):
            raise ValueError(f"dequantize(): {transformers_bitnet.NO_PLACE_FOR_NORMS}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        offloaded = [n for n, m in model.named_modules() if isinstance(m, CompressedModule) and m.is_offloaded]
        if offloaded:
            raise ValueError(
                f"dequantize() needs every weight in memory, but {len(offloaded)} modules are offloaded, for example "
                f"{offloaded[:3]}: load with a device_map without 'disk' or cpu offload, or pass dequantize=True when loading"
            )
        for name, module in list(model.named_modules()):
            if isinstance(module, EfficientLinear):
                model.set_submodule(name, _dense_linear(module, dtype or module.weight.dtype))
            elif isinstance(module, EfficientExperts):
                decompress_experts(module, dtype or module._parameters[module._expert_names[0]].dtype)
        model._weight_conversions = (getattr(model, "_weight_conversions", None) or []) + self._expert_conversions
        saving.restore_save(model)
        if model.can_generate():
            from hf_efficient.integrations.transformers_generation import disable_automatic

            disable_automatic(model)
        return model


def _checked(name: str, weight: CompressedWeight) -> CompressedWeight:
    try:
        weight.shapes()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return weight


def _dense_linear(module: EfficientLinear, dtype: torch.dtype) -> nn.Module:
    """The ordinary layer that `module` stands for, with its hook."""
    weight = module.dequantized(dtype=dtype)
    if module.transposed:
        new = Conv1D(module.out_features, module.in_features)
        new.weight = nn.Parameter(weight.t().contiguous())
        new.bias = module.bias
    else:
        new = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta", dtype=dtype)
        new.weight, new.bias = nn.Parameter(weight), module.bias
    if new.bias is not None:
        new.bias.data = new.bias.data.to(dtype)
    new.train(module.training)
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, module._hf_hook)
    return new
