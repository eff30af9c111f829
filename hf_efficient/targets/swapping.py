"""Replaces a model's ordinary layers by compressed ones on the meta device, which have no data yet."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.bit_linear import attach_input_norm
from hf_efficient.configs import CompressionConfig
from hf_efficient.dense_layers import NO_PLACE_FOR_NORMS
from hf_efficient.experts import compress_experts, expert_weight_names, is_sorted_experts, is_transposed
from hf_efficient.layers import CompressedWeight, stand_in
from hf_efficient.targets import output_head
from hf_efficient.targets.chooser import TargetChooser


@dataclass
class Swapped:
    """What `swap` did.

    Args:
        weights: full name of a weight -> (how it is compressed, whether the original is transposed).
        calibrated: full name of a module that is compressed after loading -> its config.
        untied: name of a parameter -> that of one of the output embedding that was tied to it, and is so no more.
        tied_to_embedding: name of a weight that is tied to a compressed embedding's -> the name of that.
    """

    weights: dict[str, tuple[CompressedWeight, bool]] = field(default_factory=dict)
    calibrated: dict[str, CompressionConfig] = field(default_factory=dict)
    untied: dict[str, str] = field(default_factory=dict)
    tied_to_embedding: dict[str, str] = field(default_factory=dict)


def swap(model, config: CompressionConfig, pre_quantized: bool, files, own_files: bool) -> Swapped:
    """Swaps the modules that are compressed as they are loaded. Those that are compressed later, or dequantized while
    they are loaded, stay.

    Args: as those of `TargetChooser`.

    Raises:
        ValueError: nothing is compressed, or the config does not fit the model; names what does not.
    """
    kept, untied = output_head.prepare(model, config, pre_quantized)
    chooser = TargetChooser(model, config, pre_quantized, kept, files, own_files)
    targets, embedding = chooser.targets(), chooser.embedding
    swapped = Swapped(untied=untied)
    for name, module, own in targets:
        if embedding is not None and name == embedding.name:
            swapped.tied_to_embedding = embedding.tied_weights
            if not pre_quantized:  # what was chosen for it stands in the checkpoint
                config.overrides = {name: own.scheme(), **config.overrides}
        if not pre_quantized:
            own.check_method()
        if not pre_quantized and own.needs_calibration():
            swapped.calibrated[name] = own
        swapped.weights |= _weights_of(name, module, own, name in swapped.calibrated)
        if name not in swapped.calibrated and not (pre_quantized and config.dequantize):
            if isinstance(module, nn.Embedding):
                embedding.swap(model, own.format())
            elif isinstance(module, (nn.Linear, Conv1D)):
                model.set_submodule(name, stand_in(module, own.format()))
            else:
                compress_experts(module, own.format())
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no weight that {type(config).__name__}(modules_to_not_convert="
            f"{config.modules_to_not_convert}, overrides={config.overrides}) would compress: it needs nn.Linear, "
            "Conv1D or fused expert weights that are not excluded"
        )
    if getattr(config, "rms_norm_eps", None) is not None:
        if config.dequantize:
            raise ValueError(f"dequantize=True: {NO_PLACE_FOR_NORMS}")
        for name, _, _ in targets:
            _attach_norm(model.get_submodule(name), config.rms_norm_eps)
    return swapped


def _attach_norm(linear: nn.Module, eps: float) -> None:
    """Has `linear` normalise its input by a module, without values, of the class that transformers uses for it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    with torch.device("meta"):
        norm = LlamaRMSNorm(linear.in_features, eps=eps)
    attach_input_norm(linear, norm.to(linear.weight.dtype))


def _weights_of(name: str, module, config: CompressionConfig, is_calibrated: bool) -> dict:
    """What `Swapped.weights` says of one module."""
    format, weights = config.format(), {}
    if isinstance(module, nn.Embedding):
        shape = module.num_embeddings, module.embedding_dim
        weights[f"{name}.weight"] = CompressedWeight("", *shape, format), False
    elif isinstance(module, (nn.Linear, Conv1D)):
        transposed = isinstance(module, Conv1D)
        columns, rows = (module.nx, module.nf) if transposed else (module.in_features, module.out_features)
        weights[f"{name}.weight"] = CompressedWeight("", rows, columns, format), transposed
    else:
        if is_calibrated and is_sorted_experts(module):
            raise ValueError(
                f"{name} ({type(module).__name__}): method={config.method!r} and other choices that need calibration "
                "are not supported for these experts; give them an override with method='rtn', or None"
            )
        transposed = is_transposed(module)
        for parameter in expert_weight_names(module):
            experts, rows, columns = getattr(module, parameter).shape
            rows, columns = (columns, rows) if transposed else (rows, columns)
            weight = CompressedWeight(parameter + "_", rows, columns, format, experts)
            weights[f"{name}.{parameter}"] = weight, transposed
    for weight, _ in weights.values():
        try:
            weight.shapes()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return weights
