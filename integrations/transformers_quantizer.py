"""The quantizer that transformers' `from_pretrained`, `save_pretrained` and `dequantize` call for our configs."""

import copy

import torch

from hf_efficient.checkpoints import saved_tensors
from hf_efficient.dense_layers import make_dense
from hf_efficient.integrations import loaded_layouts
from hf_efficient.integrations import transformers_model_methods as model_methods
from hf_efficient.integrations import transformers_tensor_parallel as tensor_parallel
from hf_efficient.integrations import transformers_weight_conversions as weight_conversions
from hf_efficient.kernels.native.heap import HeapTrimmer
from hf_efficient.targets.swapping import Swapped, swap


class EfficientQuantizer(weight_conversions.HfQuantizer):
    """Swaps modules on the meta device, quantizes each weight as it arrives, and derives the layouts the device reads.

    Attributes:
        swapped: the weights that it compresses; see `Swapped`.
        arrived: names of the weights that were compressed while they were loaded.
        heap: counts the bytes of dense weights, to return them to the system.
        residence: where the weights are while blocks are compressed, if not in memory; see `calibrate`.
        part_to_save: name -> tensor, what `save_pretrained` saves instead of all tensors.
    """

    requires_calibration = False
    is_trainable = True  # adapters; the compressed weights are frozen

    def __init__(self, quantization_config, **kwargs):
        # a copy: calibration writes into it, and the caller's stays as it is
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.swapped, self.arrived, self.heap = Swapped(), set(), HeapTrimmer()
        self.residence = self.part_to_save = None
        # canonical tensors of an embedding to which others are tied, while it is loaded
        self._tied_parts, self._is_contradictory = None, False
        self._state_before = None  # of the files of our own checkpoint, before they are read
        self._conversions = None  # of its names and tensors, in words

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model by itself: not with experts, which read token counts back."""
        return all(weight.experts is None for weight, _ in self.swapped.weights.values())

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model):
        is_given = self.part_to_save is not None or getattr(model, "_hf_peft_config_loaded", False)
        return self.part_to_save if is_given else _without_adapters(model), {}

    def validate_environment(self, *args, **kwargs):
        if not self.pre_quantized:
            self.quantization_config.check_attributes()
        if self.quantization_config.dequantize and not self.pre_quantized:
            raise ValueError(
                "dequantize=True is for a checkpoint that is already quantized: this one is not; drop the argument, or "
                "call model.dequantize() after loading"
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, device_map=None, **kwargs):
        self.before_loading(model, checkpoint_files, device_map)

    def before_loading(self, model, files, device_map=None) -> None:
        """Swaps the modules of `model`, on the meta device. files: of the checkpoint, or None."""
        own_files = type(self) is EfficientQuantizer
        self._state_before = loaded_layouts.state_of_files(files or () if own_files and self.pre_quantized else ())
        if own_files and not self.pre_quantized:
            from hf_efficient.calibration import loading

            self.quantization_config = self.quantization_config.settled(loading.can_run(model, device_map))
        config = self.quantization_config
        tensor_parallel.check(model, config, self.pre_quantized, own_files)
        self._files, self._uses_device_map = files, device_map is not None
        self.swapped = swap(model, config, self.pre_quantized, files, own_files)
        if self.swapped.calibrated:
            from hf_efficient.calibration import loading  # here: a saved checkpoint loads without its 22 modules

            loading.prepare(config, self.swapped.calibrated, device_map, model, files)

    def update_parallel_plan(self, model, plan):
        if plan is model.tp_plan:
            tensor_parallel.update_plan(model, plan, self.swapped.calibrated)
        if plan is model.ep_plan:
            tensor_parallel.update_expert_plan(model, plan)

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        if self.pre_quantized:
            return False
        own = self.stands_for(param_name)
        return len(own) > 1 or any(map(self.on_arrival, own))

    def stands_for(self, name: str) -> tuple[str, ...]:
        """Names of the weights that the tensor `name` of a checkpoint becomes: two where the output embedding was tied
        and is compressed apart, another one where its weight is tied to that of a compressed embedding."""
        if name in self.swapped.untied:
            return name, self.swapped.untied[name]
        return (self.swapped.tied_to_embedding.get(name, name),)

    def on_arrival(self, name: str) -> bool:
        """Whether `name` is a weight that is quantized as it is loaded."""
        return name in self.swapped.weights and name.rpartition(".")[0] not in self.swapped.calibrated

    def get_quantize_ops(self):
        return weight_conversions.QuantizeOnArrival(self)

    def quantize(self, name: str, tensor: torch.Tensor, config) -> dict[str, torch.Tensor]:
        """The tensors that replace the weight `name`, by full name. config: that of its module."""
        weight, transposed = self.swapped.weights[name]
        dense = tensor.transpose(-1, -2) if transposed else tensor
        try:
            if tensor.is_meta:
                dtypes, shapes = weight.format.dtypes(tensor.dtype), weight.shapes()
                parts = {
                    part: torch.empty(shapes[parameter], dtype=dtypes[part], device="meta")
                    for part, parameter in weight.names().items()
                }
            elif weight.experts is None:
                parts = config.compress(dense, weight.format)
            else:
                each = [config.compress(expert, weight.format.expert(index)) for index, expert in enumerate(dense)]
                parts = weight.format.stack(each)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if name in self.swapped.tied_to_embedding.values() and not tensor.is_meta:
            self._note_tied(parts)
        self.arrived.add(name)
        self.heap.count(tensor.nbytes)
        saved = saved_tensors.as_saved(name, weight, parts, tensor.dtype)
        if self._uses_device_map:  # else the dense weight of the files would stand on disk for what is tied
            saved |= {tied: saved[name].clone() for tied, own in self.swapped.tied_to_embedding.items() if own == name}
        return saved

    def _note_tied(self, parts: dict[str, torch.Tensor]) -> None:
        """Notes whether the checkpoint holds tied weights with other numbers than each other. transformers would hide
        an error that is raised while it converts."""
        first = self._tied_parts = self._tied_parts or parts
        self._is_contradictory |= not all(torch.equal(first[part], tensor) for part, tensor in parts.items())

    def get_new_dtype(self, converter, param, dtype):
        target = converter.target_patterns[0]
        if target in self._canonical_names():
            return None  # they keep the dtypes that the codes were chosen for
        return super().get_new_dtype(converter, param, dtype)

    def parts(self) -> list[str]:
        """Names of the canonical tensors that any of the weights has."""
        return sorted({part for weight, _ in self.swapped.weights.values() for part in weight.names()})

    def _canonical_names(self) -> set[str]:
        if not hasattr(self, "_names"):
            self._names = {
                saved_tensors.part_name(name, weight, part)
                for name, (weight, _) in self.swapped.weights.items()
                for part in weight.names()
            }
        return self._names

    def update_weight_conversions(self, conversions, model):
        weights = self.swapped.weights
        leaves = sorted({name.rpartition(".")[2] for name in weights}, key=lambda leaf: leaf != "weight")
        # those of experts, and of linear layers that other checkpoints hold fused
        self._joined = weight_conversions.joining(conversions, weights)
        if self.pre_quantized:
            dtypes = saved_tensors.check(self._files, weights, conversions, model)
            if not self.quantization_config.dequantize:
                weight_conversions.keep_dtypes(model, dtypes)
                if self._state_before is not None:
                    self._conversions = [f"{type(c)} {weight_conversions.patterns(c)}" for c in conversions]
                return conversions
            return conversions + [weight_conversions.dequantizer(self, model, leaf) for leaf in leaves]
        if not self._uses_device_map:
            return conversions
        # a weight that goes to disk is written there again only if a converter made it
        resave = weight_conversions.Resave()
        return conversions + [weight_conversions.converter(rf"\.{leaf}", f".{leaf}", resave) for leaf in leaves]

    def _process_model_after_weight_loading(self, model, **kwargs):
        self.after_loading(model)
        return model

    def after_loading(self, model) -> None:
        """Compresses what needs calibration, derives layouts, and replaces methods of `model`."""
        self._tied_parts = None
        if self._is_contradictory:
            tied = self.swapped.tied_to_embedding
            raise ValueError(
                f"embeddings=True: the checkpoint holds {' or '.join(sorted(tied))} with other numbers than "
                f"{next(iter(tied.values()))}, to which the config ties it: set tie_word_embeddings=False there, or "
                "give embeddings=False"
            )
        if self.pre_quantized and self.quantization_config.dequantize:
            weight_conversions.forget(model)
            return
        if type(self) is EfficientQuantizer and self.pre_quantized and self._files is None:
            saved_tensors.check_loaded(self.swapped.weights, model)
        if not self.pre_quantized:
            loaded = {n for n, weight in model.named_parameters() if getattr(weight, "_is_hf_initialized", False)}
            missing = sorted(set(self.swapped.weights) - self.arrived - loaded)
            if missing:
                raise ValueError(
                    f"the checkpoint has no weights for {len(missing)} of the {len(self.swapped.weights)} weights to "
                    f"quantize, for example {missing[:3]}: is its config that of another architecture?"
                )
        if self.swapped.calibrated:
            from hf_efficient.calibration import loading

            with model_methods.writing(model):
                loading.run(model, self.quantization_config, self.swapped.calibrated, self.residence)
        is_cut = tensor_parallel.localize(model)
        self.forget_conversions(model)
        files, conversions = self._files or () if self.pre_quantized else (), None if is_cut else self._conversions
        loaded_layouts.derive_all(model, self.heap, files, self._state_before, conversions)
        self.heap.finish()
        if is_cut:
            tensor_parallel.refuse_saving(model)
        else:
            model_methods.replace_methods(model)

    def forget_conversions(self, model) -> None:
        """Makes the model be saved with the compressed tensors that it has."""
        weight_conversions.forget(model, self._joined)

    def dequantize(self, model, dtype=None):
        """dtype: by default that of each layer, which casts of the model change and its config does not follow."""
        self._dequantize(model, dtype)
        self.remove_quantization_config(model)
        return model

    def _dequantize(self, model, dtype=None):
        make_dense(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        weight_conversions.remember(model, self._joined)
        model_methods.restore_methods(model)
        return model


def _without_adapters(model) -> dict[str, torch.Tensor] | None:
    """The tensors of `model` by the names they have without PEFT's layers, which stay where adapters were deleted; None
    where there are none. Raises ValueError where an adapter is left: by its names nothing would load the checkpoint."""
    wrapped = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
    if not wrapped:
        return None
    tensors = model.state_dict()
    for name in tensors:
        if any(name.startswith(f"{w}.") and not name.startswith(f"{w}.base_layer.") for w in wrapped):
            raise ValueError(
                f"save_pretrained: {name} belongs to an adapter: save the adapter with the PEFT model's "
                "save_pretrained, and this model after its unload() or hf_efficient.integrations.peft.merge_and_unload"
            )
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
