"""Adapters from PEFT on compressed layers: how they are attached, and what is refused because it needs a weight that
can change.

PEFT has no registry of layers that outlives one config, so importing this wraps the methods that all its tuners pass
through: injection, merging, saving, and the trainable copies of `modules_to_save`. It happens by itself when `peft` is
imported.
"""

import contextlib
import copy
import functools

from peft import LNTuningConfig, LoraConfig, PeftModel
from peft.tuners.lora import layer as lora
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import save_and_load
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from hf_efficient.dense_layers import dense_embedding, dense_linear
from hf_efficient.embeddings import EfficientEmbedding, TiedEmbedding, TiedLinear
from hf_efficient.experts import EfficientExperts, decompress_experts
from hf_efficient.integrations.peft_weights import AdaptedLinear, DenseWeight, FrozenWeightError
from hf_efficient.integrations.transformers_layers import keep_unfused
from hf_efficient.layers import CompressedModule, EfficientLinear


_EMBEDDINGS = (EfficientEmbedding, TiedEmbedding, TiedLinear)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")  # values of init_lora_weights
_WAY_OUT = (
    "initialise on the uncompressed model, compress what is left of its weights and load the adapter there with "
    "init_lora_weights=True, or adapt model.dequantize()"
)


def register() -> None:
    """Wraps PEFT's classes. Idempotent."""
    if hasattr(BaseTuner, "_serves_hf_efficient"):
        return
    BaseTuner._serves_hf_efficient = True
    PeftModel.__init__ = _unfused(PeftModel.__init__)
    BaseTuner.__init__ = _with_readable_weights(BaseTuner.__init__)
    BaseTuner.inject_adapter = _injecting(BaseTuner.inject_adapter)
    BaseTuner.merge_adapter = _merging(BaseTuner.merge_adapter)
    BaseTuner.merge_and_unload = _merging(BaseTuner.merge_and_unload)
    BaseTuner.unload = _unloading(BaseTuner.unload)
    BaseTunerLayer.weight = property(_weight_of_base(BaseTunerLayer.weight.fget))
    ModulesToSaveWrapper.update = _copying_dense(ModulesToSaveWrapper.update)
    save_and_load.has_valid_embedding_base_layer = _that_is_dense(save_and_load.has_valid_embedding_base_layer)
    TrainableTokensLayer.update_layer = _with_dense_rows(TrainableTokensLayer.update_layer)


def base_of(module: nn.Module) -> nn.Module:
    """The layer under the adapters of `module`."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


@contextlib.contextmanager
def _readable(model: nn.Module):
    """Inside, all compressed layers show dense weights; afterwards, those under adapters do."""
    for module in model.modules():
        if type(module) is EfficientLinear:
            module.__class__ = AdaptedLinear
    try:
        yield
    finally:
        for name, module in model.named_modules():
            if type(module) is AdaptedLinear and not name.endswith("base_layer"):
                module.__class__ = EfficientLinear


def _with_readable_weights(original):
    @functools.wraps(original)
    def __init__(self, model, *args, **kwargs):
        with _readable(model):
            original(self, model, *args, **kwargs)

    return __init__


def _unfused(original):
    @functools.wraps(original)
    def __init__(self, model, *args, **kwargs):
        original(self, model, *args, **kwargs)
        keep_unfused(model)  # prompts are not injected

    return __init__


def _injecting(original):
    @functools.wraps(original)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        if not any(isinstance(module, CompressedModule) for module in model.modules()):
            return original(self, model, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        if hasattr(config, "_register_custom_module"):
            config._register_custom_module({EfficientExperts: _adapt_experts})
        # instead of the methods of each tuner, for the time of this call
        self._check_target_module_exists = _checking_first(self, model)
        self._create_and_replace = functools.partial(_create_and_replace, self._create_and_replace)
        try:
            with _readable(model):
                original(self, model, adapter_name, *args, **kwargs)
            keep_unfused(model)
        finally:
            del self._check_target_module_exists, self._create_and_replace

    return inject_adapter


def _checking_first(tuner: BaseTuner, model: nn.Module):
    """PEFT's `_check_target_module_exists`, that looks at all targets before the first one is changed."""
    original, is_checked = tuner._check_target_module_exists, False

    def check(config, key, *args):
        nonlocal is_checked
        if not is_checked:
            is_checked = True
            init = getattr(config, "init_lora_weights", None)
            changes = isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE)
            if changes or getattr(config, "kasa_config", None) is not None:
                for name, module in model.named_modules():
                    if isinstance(base_of(module), EfficientLinear) and original(config, name, *args):
                        raise ValueError(_refusal(config, name, base_of(module)))
        return original(config, key, *args)

    return check


def _create_and_replace(original, config, adapter_name, target, *args, current_key, **kwargs) -> None:
    base = base_of(target)
    if isinstance(base, _EMBEDDINGS):
        options = {name: getattr(config, name, None) for name in ("use_dora", "target_parameters", "kasa_config")}
        plain = type(config) is LoraConfig and not any(options.values())
        if not plain or config.init_lora_weights not in (True, False, "gaussian"):
            raise ValueError(
                f"{_method(config)} reads or changes the weight of {current_key}, which is compressed "
                f"({base.format}): it must be a LoraConfig without use_dora, target_parameters and init_lora_weights "
                "that read the weight"
            )
    elif isinstance(base, EfficientLinear):
        if kwargs.get("parameter_name") is not None:
            raise ValueError(
                f"target_parameters: {current_key} is the weight of an EfficientLinear in {base.format}, which is "
                "adapted as a layer: name it in target_modules"
            )
        if isinstance(config, LNTuningConfig):
            raise ValueError(
                f"LNTuningConfig trains the layers it names, and {current_key} ({base.format}) is compressed and "
                "frozen: name it in modules_to_save, which trains a dense copy"
            )
    try:
        original(config, adapter_name, target, *args, current_key=current_key, **kwargs)
    except FrozenWeightError as error:
        raise ValueError(_refusal(config, current_key, base)) from error
    except RuntimeError as error:
        if not (isinstance(base, EfficientLinear) and base.is_offloaded):
            raise
        raise ValueError(
            f"{_method(config)} reads the weight of {current_key}, which is offloaded: load the model without disk or "
            "cpu offload, or use an adapter that only adds to outputs, such as LoRA"
        ) from error


def _refusal(config, name: str, module: CompressedModule) -> str:
    weight = f"{name} ({getattr(module, 'format', None) or module.compressed_weights()[0].format})"
    return f"{_method(config)} changes the weights that it adapts, and {weight} is compressed and frozen: {_WAY_OUT}"


def _method(config) -> str:
    """The config with those of its options that make another method of it."""
    init = getattr(config, "init_lora_weights", None)
    options = [f"init_lora_weights={init!r}"] if isinstance(init, str) else []
    options += [f"{name}=..." for name in ("use_dora", "kasa_config") if getattr(config, name, None)]
    return f"{type(config).__name__}({', '.join(options)})"


def _merging(original):
    @functools.wraps(original)
    def merge(self, *args, **kwargs):
        for name, module in self.model.named_modules():
            is_compressed = isinstance(module, BaseTunerLayer) and isinstance(base_of(module), CompressedModule)
            if is_compressed or _replaces_compressed(module):
                raise ValueError(
                    f"{original.__name__}(): {name} is compressed, and rounding the merged weight again would change "
                    "what the adapter learned: hf_efficient.integrations.peft.merge_and_unload(peft_model) merges "
                    "into dequantized weights"
                )
        return original(self, *args, **kwargs)

    return merge


def _unloading(original):
    @functools.wraps(original)
    def unload(self, *args, **kwargs):
        for name, module in self.model.named_modules():
            if _replaces_compressed(module):
                raise ValueError(
                    f"unload(): {name} is compressed, and what modules_to_save trained would stay in its place: call "
                    "delete_adapter() first, or keep it with "
                    "hf_efficient.integrations.peft.merge_and_unload(peft_model)"
                )
        with _readable(self.model):
            return original(self, *args, **kwargs)

    return unload


def _replaces_compressed(module: nn.Module) -> bool:
    """Whether an active adapter trains a copy of something compressed."""
    if not isinstance(module, ModulesToSaveWrapper) or not module.active_adapters:
        return False
    return any(isinstance(part, CompressedModule) for part in module.original_module.modules())


def _weight_of_base(original):
    def weight(self):
        """That of the layer below. Models cast to its dtype, and packed codes are integers."""
        base = self.get_base_layer()
        return base.weight if isinstance(base, (EfficientLinear, *_EMBEDDINGS)) else original(self)

    return weight


def _copying_dense(original):
    @functools.wraps(original)
    def update(self, adapter_name, tied_module=None, **kwargs):
        copied = self.original_module
        if not tied_module and adapter_name not in self.modules_to_save:
            if any(isinstance(module, CompressedModule) for module in copied.modules()):
                self.modules_to_save[adapter_name] = dense_copy(copied)
        return original(self, adapter_name, tied_module=tied_module, **kwargs)

    return update


def _that_is_dense(original):
    @functools.wraps(original)
    def has_valid_embedding_base_layer(layer):
        """PEFT saves the base of an adapted embedding, too; codes fit no other model."""
        return original(layer) and not isinstance(layer.base_layer, CompressedModule)

    return has_valid_embedding_base_layer


def _with_dense_rows(original):
    @functools.wraps(original)
    def update_layer(self, *args, **kwargs):
        if isinstance(base_of(self), _EMBEDDINGS):
            raise ValueError(
                f"trainable tokens replace rows of the embedding, which is compressed ({base_of(self).format}): load "
                "the model without embeddings=True, or adapt model.dequantize()"
            )
        return original(self, *args, **kwargs)

    return update_layer


def dense_copy(module: nn.Module) -> nn.Module:
    """A copy of `module` with ordinary weights, in the dtype it computes with."""
    new = copy.deepcopy(module)
    for name, part in list(new.named_modules()):
        if isinstance(part, (EfficientEmbedding, TiedEmbedding)):
            dense = dense_embedding(part, nn.Parameter(part.dequantized()))
            if not name:
                return dense
            new.set_submodule(name, dense)
        elif isinstance(part, EfficientLinear):
            if name.endswith("base_layer"):
                raise ValueError(f"modules_to_save: {name} is adapted as well: name it there or in target_modules")
            if any(part.children()):
                raise ValueError(
                    f"modules_to_save: a dense {name or 'layer'} has no place for {next(part.named_children())[0]}"
                )
            dense = dense_linear(part, part.weight.dtype)
            if not name:
                return dense
            new.set_submodule(name, dense)
        elif isinstance(part, EfficientExperts):
            decompress_experts(part, part._parameters[part._expert_names[0]].dtype)
    return new


def _adapt_experts(target, adapter_name, config, parameter_name=None, **kwargs):
    """PEFT's dispatch for `target_parameters` of compressed experts; None leaves it to PEFT."""
    experts = base_of(target)
    if parameter_name in experts._expert_names:
        return ParamWrapper(target, adapter_name, parameter_name=parameter_name, config=config, **kwargs)
    if any(parameter_name in weight.names().values() for weight in experts.compressed_weights()):
        raise ValueError(
            f"target_parameters: {parameter_name} is a part of a compressed weight: name one of {experts._expert_names}"
        )


class ParamWrapper(lora.ParamWrapper):  # PEFT finds it by this name
    """LoRA on one weight of fused experts, as a low-rank product that is added to that of the compressed weight."""

    def get_param(self):
        experts = self.get_base_layer()
        if not isinstance(experts, EfficientExperts):  # after dequantize()
            return super().get_param()
        return DenseWeight.of(experts, self.parameter_name + "_", experts.is_transposed)

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]):
        experts = self.get_base_layer()
        if not isinstance(experts, EfficientExperts):
            with super()._activate_lora(active_adapters):
                yield
            return
        before = experts.adapters
        adapters = [
            (self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])
            for name in active_adapters
            if name in self.lora_A
        ]
        experts.adapters = {**before, self.parameter_name: adapters}
        try:
            yield
        finally:
            experts.adapters = before


register()
