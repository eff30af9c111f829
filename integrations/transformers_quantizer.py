"""The quantizer that transformers' `from_pretrained`, `save_pretrained` and `dequantize` call for our configs."""

import copy

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, auto
from transformers.quantizers.base import get_keys_to_not_convert

from hf_efficient.calibration import loading
from hf_efficient.checkpoints import checks
from hf_efficient.checkpoints.adopt import bitnet
from hf_efficient.configs import BitNetConfig, CompressionConfig, SparseConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.experts import (
    EfficientExperts,
    compress_experts,
    decompress_experts,
    expert_weight_names,
    is_sorted_experts,
    is_transposed,
)
from hf_efficient.integrations import transformers_saving, transformers_sub_configs
from hf_efficient.integrations import transformers_tensor_parallel as tensor_parallel
from hf_efficient.integrations.transformers_weight_conversions import QuantizeOnArrival, Resave, dequantizer
from hf_efficient.kernels.native.heap import HeapTrimmer
from hf_efficient.layers import PLACEHOLDER_SHAPE, CompressedModule, CompressedWeight, EfficientLinear, stand_in
from hf_efficient.targets import patterns
from hf_efficient.targets.chooser import TargetChooser


CONFIGS = (WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig)


def register() -> None:
    """Registers the configs and the quantizer with transformers, and lets `from_pretrained(quantization_config=...)` ask
    for `dequantize=True` on a quantized checkpoint, which transformers allows a closed tuple of configs. Idempotent."""
    for config in CONFIGS:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[config.name] = config
        auto.AUTO_QUANTIZER_MAPPING[config.name] = EfficientQuantizer
        if config not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
            auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (config,)
    bitnet.register()
    transformers_sub_configs.register(tuple(config.name for config in CONFIGS))
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

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, device_map=None, **kwargs):
        tensor_parallel.check(model, self.quantization_config, self.pre_quantized, type(self) is EfficientQuantizer)
        self._checkpoint_files, self._uses_device_map = checkpoint_files, device_map is not None
        self._arrived, self._tied_head, self._heap = set(), None, HeapTrimmer()
        # of a checkpoint of transformers' BitNetQuantConfig, the modules that it holds in ternary form
        self._is_bitnet = getattr(self.quantization_config, "source", None) is not None
        ternary = bitnet.settle_modules(self.quantization_config, model) if self._is_bitnet else None
        self._prepare_head(model)
        self._weights = {}  # full name of a weight -> (CompressedWeight, whether the original is transposed)
        self._plan = {}  # full name of a module that is compressed after loading -> its config
        dequantize = self.pre_quantized and self.quantization_config.dequantize
        own_files = type(self) is EfficientQuantizer and not self._is_bitnet
        chooser = TargetChooser(
            model, self.quantization_config, self.pre_quantized, self._kept, checkpoint_files, own_files
        )
        targets = chooser.targets()
        for name, module, config in targets:
            if not self.pre_quantized and config.needs_calibration():
                self._plan[name] = config
            stays_dense = dequantize or name in self._plan
            format = config.format()
            if isinstance(module, (nn.Linear, Conv1D)):
                transposed = isinstance(module, Conv1D)
                width = (module.nx, module.nf) if transposed else (module.in_features, module.out_features)
                weight = CompressedWeight("", width[1], width[0], format)
                self._weights[f"{name}.weight"] = _checked(name, weight), transposed
                if not stays_dense:
                    model.set_submodule(name, stand_in(module, format))
            else:
                if name in self._plan and is_sorted_experts(module):
                    raise ValueError(
                        f"{name} ({type(module).__name__}): method={config.method!r} and other choices that need calibration are "
                        f"not supported for these experts; give them an override with method='rtn', or None"
                    )
                transposed = is_transposed(module)
                shapes = {p: getattr(module, p).shape for p in expert_weight_names(module)}
                for parameter, (experts, rows, columns) in shapes.items():
                    n, k = (columns, rows) if transposed else (rows, columns)
                    weight = CompressedWeight(parameter + "_", n, k, format, experts)
                    self._weights[f"{name}.{parameter}"] = _checked(name, weight), transposed
                if not stays_dense:
                    compress_experts(module, format)
        kind = type(self.quantization_config).__name__
        if not self._weights:
            raise ValueError(
                f"{type(model).__name__} has no weight that {kind}(modules_to_not_convert="
                f"{self.quantization_config.modules_to_not_convert}, overrides={self.quantization_config.overrides}) "
                "would compress: it needs nn.Linear, Conv1D or fused expert weights that are not excluded"
            )
        if not self.pre_quantized:
            patterns.check_overrides(self.quantization_config, model, {name for name, _, _ in targets})
        if self._is_bitnet:
            bitnet.check_targets(self, ternary)
        bitnet.attach_norms(self, model)
        if self._plan:
            loading.prepare(self.quantization_config, self._plan, device_map, model.name_or_path)

    def update_parallel_plan(self, model, plan):
        if plan is model.tp_plan:
            tensor_parallel.update_plan(model, plan, self._plan)

    def _prepare_head(self, model) -> None:
        """Names what is kept by default; unties an output embedding that is to be quantized."""
        kept = {key.removesuffix(".weight").removesuffix(".bias") for key in get_keys_to_not_convert(model)}
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
                checks.part_name(name, weight, part)
                for name, (weight, _) in self._weights.items()
                for part in weight.names()
            }
        return self._names

    def update_weight_conversions(self, weight_conversions, model):
        leaves = sorted({name.rpartition(".")[2] for name in self._weights}, key=lambda leaf: leaf != "weight")
        # those of experts, and of linear layers that other checkpoints hold fused: what saving would put together again
        self._expert_conversions = [
            c
            for c in weight_conversions
            if isinstance(c, WeightConverter)
            and any(c.reverse_transform().rename_source_key(name)[1] is not None for name in self._weights)
        ]
        if self._is_bitnet:
            return bitnet.conversions(self, model, weight_conversions)
        if self.pre_quantized:
            checks.check(self._checkpoint_files, self._weights, weight_conversions, model)
            if not self.quantization_config.dequantize:
                return weight_conversions
            return weight_conversions + [dequantizer(self, leaf) for leaf in leaves]
        if not self._uses_device_map:
            return weight_conversions
        # A weight that goes to disk is written there again only if a converter made it
        return weight_conversions + [WeightConverter(rf"\.{leaf}", f".{leaf}", [Resave()]) for leaf in leaves]

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._is_bitnet:
            bitnet.finish(model)
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
            loading.run(model, self.quantization_config, self._plan)
        is_cut = tensor_parallel.localize(model)
        # Compressed weights are saved as they are; converters would split or concatenate what is no longer a weight
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
        transformers_saving.replace_methods(model)
        if model.can_generate():
            from hf_efficient.integrations.transformers_generation import enable_automatic

            enable_automatic(model)
        return model

    def _dequantize(self, model, dtype=None):
        if bitnet.has_norms(self.quantization_config):
            raise ValueError(f"dequantize(): {bitnet.NO_PLACE_FOR_NORMS}")
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        offloaded = [n for n, m in model.named_modules() if isinstance(m, CompressedModule) and m.is_offloaded]
        if offloaded:
            raise ValueError(
                f"dequantize() needs every weight in memory, but {len(offloaded)} modules are offloaded, for example "
                f"{offloaded[:3]}: load with a device_map without 'disk' or cpu offload, or pass dequantize=True when loading"
            )
        for name, module in list(model.named_modules()):
            if isinstance(module, EfficientLinear):
                model.set_submodule(name, dense_linear(module, dtype or module.weight.dtype))
            elif isinstance(module, EfficientExperts):
                decompress_experts(module, dtype or module._parameters[module._expert_names[0]].dtype)
        model._weight_conversions = (getattr(model, "_weight_conversions", None) or []) + self._expert_conversions
        transformers_saving.restore_methods(model)
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


def dense_linear(module: EfficientLinear, dtype: torch.dtype) -> nn.Module:
    """The ordinary layer that `module` stands for, with its hook."""
    weight = module.dequantized(dtype=dtype)
    if module.transposed:
        new = Conv1D(module.out_features, module.in_features)
        new.weight = nn.Parameter(weight.t().contiguous())
        new.bias = module.bias
    else:
        has_bias = module.bias is not None
        new = module.original(module.in_features, module.out_features, has_bias, device="meta", dtype=dtype)
        new.weight, new.bias = nn.Parameter(weight), module.bias
    if new.bias is not None:
        new.bias.data = new.bias.data.to(dtype)
    new.train(module.training)
    if hasattr(module, "_hf_hook"):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, module._hf_hook)
    return new
