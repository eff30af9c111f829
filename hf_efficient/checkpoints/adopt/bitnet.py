"""Checkpoints of transformers' `BitNetQuantConfig`, read by `from_pretrained(..., quantization_config=BitNetConfig())`.

Touches the insides of transformers in one place: `AutoHfQuantizer.merge_quantization_configs` refuses a config of another
class than the checkpoint's, ignores one of the same class, and has no registry. What is loaded without a config of ours passes
through untouched.
"""

import functools
import inspect
import math

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    _IdentityOp,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, auto
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from hf_efficient.bit_linear import attach_input_norm
from hf_efficient.checkpoints import compressed_already
from hf_efficient.configs import BitNetConfig, module_matches
from hf_efficient.configs.bitnet import SOURCE_FIELDS
from hf_efficient.experts import is_fused_experts
from hf_efficient.formats.ternary import canonical_of_bitnet
from hf_efficient.integrations import transformers_dtypes
from hf_efficient.layers import PLACEHOLDER_SHAPE


_SUPPORTED = "transformers 5.23"
_FLOATS = ("F64", "F32", "F16", "BF16")
NO_PLACE_FOR_NORMS = "an ordinary model has no place for the norms inside the linear layers (rms_norm_eps)"


def register() -> None:
    """Lets our `BitNetConfig` meet a checkpoint of `BitNetQuantConfig`, and refuses any other config of ours than that of a
    checkpoint that is compressed already. Idempotent.

    Raises ImportError when transformers lacks the inside that this needs, naming the versions that have it.
    """
    merge = getattr(auto.AutoHfQuantizer, "merge_quantization_configs", None)
    names = ["quantization_config", "quantization_config_from_args"]
    if merge is None or list(inspect.signature(merge).parameters) != names:
        import transformers

        raise ImportError(
            f"hf_efficient's BitNetConfig needs AutoHfQuantizer.merge_quantization_configs({', '.join(names)}), which "
            f"transformers {transformers.__version__} does not have. Supported: {_SUPPORTED}."
        )
    if not hasattr(merge, "_hf_efficient"):
        auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(_read_bitnet_as_ours(merge))


def _read_bitnet_as_ours(original):
    @functools.wraps(original)
    def merge_quantization_configs(quantization_config, quantization_config_from_args):
        saved, asked = quantization_config, quantization_config_from_args
        if isinstance(asked, BitNetConfig) and not isinstance(saved, BitNetConfig):
            saved = saved if isinstance(saved, dict) else saved.to_dict()
            if saved.get("quant_method") == "bitnet":
                config = BitNetConfig.of_checkpoint(saved, asked)
                config.source["modules_to_not_convert"] = saved.get("modules_to_not_convert")
                return config
        return original(saved, compressed_already.check(saved, asked))

    merge_quantization_configs._hf_efficient = True
    return merge_quantization_configs


def has_norms(config) -> bool:
    """Whether the layers of a model with this config normalise their inputs."""
    return getattr(config, "rms_norm_eps", None) is not None


def is_online(source: dict) -> bool:
    """Whether the weights of the checkpoint are floats that are ternarised on every forward."""
    return source["linear_class"] == "autobitlinear" and source["quantization_mode"] == "online"


def settle_modules(config: BitNetConfig, model) -> set[str]:
    """Names of the modules that the checkpoint holds in ternary form: those that transformers' own quantizer would take.
    Writes into `config` what makes our quantizer take the same.

    Raises:
        ValueError: `config` asks for another choice; the checkpoint has made it.
    """
    kept = HfQuantizer.get_modules_to_not_convert(
        model, config.source["modules_to_not_convert"], model._keep_in_fp32_modules
    )
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    ternary = {name for name in linears if should_convert_module(name, kept)}
    head = next((name for name, module in linears.items() if module is model.get_output_embeddings()), None)
    if config.quantize_lm_head and head not in ternary:
        raise ValueError("quantize_lm_head=True is not supported: the checkpoint keeps its output embedding as it is")
    if head in ternary and f"{head}.weight" in model.all_tied_weights_keys:
        raise ValueError(f"the checkpoint holds {head} in ternary form, but its config ties it to the input embedding")
    config.quantize_lm_head = head in ternary
    given = config.source["modules_to_not_convert"] or ()
    excluded = []
    for pattern in config.modules_to_not_convert or ():
        hit = sorted(name for name in ternary if module_matches(pattern, name))
        if hit and pattern not in given:
            raise ValueError(
                f"modules_to_not_convert: {pattern!r} names {hit[0]}, which the checkpoint holds in ternary form"
            )
        if not hit:
            excluded.append(pattern)
    for pattern in config.overrides:
        if not any(module_matches(pattern, name) for name in ternary):
            raise ValueError(f"overrides: {pattern!r} matches no module that the checkpoint holds in ternary form")
    for name in sorted(ternary):
        own = config.for_module(name)
        if own is None or own.per_channel:
            raise ValueError(
                f"overrides: {name} is to be {'left as it is' if own is None else 'ternary with one scale a row'}, but the "
                "checkpoint holds it in ternary form with one scale"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) or is_fused_experts(module):
            if name not in ternary and not any(module_matches(pattern, name) for pattern in excluded):
                excluded.append(name)
    config.modules_to_not_convert = excluded or None
    return ternary


def check_targets(quantizer, ternary: set[str]) -> None:
    """Raises ValueError unless `quantizer` took exactly the modules called `ternary`."""
    taken = {name.rpartition(".")[0] for name in quantizer._weights}
    if different := sorted(taken ^ ternary):
        raise ValueError(
            f"{different[0]} is {'not ' if different[0] in taken else ''}ternary in the checkpoint, which hf_efficient "
            "cannot represent for this module: load the checkpoint without BitNetConfig"
        )


def attach_norms(quantizer, model) -> None:
    """Gives the compressed modules the norms that the config has (`rms_norm_eps`), of the class that transformers uses.
    Raises ValueError for dequantize=True with such norms."""
    config = quantizer.quantization_config
    if not has_norms(config):
        return
    if config.dequantize:
        raise ValueError(f"dequantize=True: {NO_PLACE_FOR_NORMS}")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for name in quantizer._weights:
        module = model.get_submodule(name.rpartition(".")[0])
        with torch.device("meta"):
            norm = LlamaRMSNorm(module.in_features, eps=config.rms_norm_eps)
        attach_input_norm(module, norm.to(module.weight.dtype))


def conversions(quantizer, model, weight_conversions) -> list:
    """`weight_conversions` and those that make canonical tensors (or, with dequantize=True, weights) of the checkpoint's.

    Raises:
        ValueError: the files do not hold what the config promises; names the tensors, before any weight is read.
    """
    _check_files(quantizer, model, [c for c in weight_conversions if isinstance(c, WeightRenaming)])
    leaves = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in quantizer._weights})
    new = [
        WeightConverter(
            [rf"\b{leaf}\.weight_scale", rf"\b{leaf}\.weight"], f"{leaf}.weight", [CanonicalOnArrival(quantizer)]
        )
        for leaf in leaves
    ]
    return weight_conversions + new


def _check_files(quantizer, model, renamings) -> None:
    files = quantizer._checkpoint_files
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(
            f"a checkpoint of BitNetQuantConfig is read from safetensors files, not from {list(map(str, files or ()))[:3]}: "
            "save it again with safetensors"
        )
    weights, state = quantizer._weights, model.state_dict()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = {**dict.fromkeys(state, True), **{f"{name}.weight_scale": True for name in linears}}
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():
                name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, known)
                piece = opened.get_slice(key)
                found[name] = piece.get_dtype(), tuple(piece.get_shape())
    source = quantizer.quantization_config.source
    wrong = []
    for name, (weight, _) in weights.items():
        wrong += _problems(name, weight.out_features, weight.in_features, found, source)
    for name, (dtype, _) in found.items():
        stray = name.endswith((".weight_scale", ".rms_norm.weight")) and name not in state
        stray |= dtype == "U8" and name in state and state[name].dtype != torch.uint8
        if stray and name.rpartition(".")[0] + ".weight" not in weights:
            wrong.append(f"{name} {dtype} belongs to no ternary module")
    if wrong:
        asked = ", ".join(f"{field}={source[field]!r}" for field in SOURCE_FIELDS)
        raise ValueError(
            f"the checkpoint does not hold what its BitNetQuantConfig ({asked}) and architecture promise in {len(wrong)} "
            f"places, for example {'; '.join(wrong[:3])}"
        )


def _problems(name: str, rows: int, columns: int, found: dict, source: dict) -> list[str]:
    """What is wrong with the tensors of the weight called `name`. found: name -> (dtype, shape)."""
    problems, layer = [], name.removesuffix("weight")
    dtype, shape = found.get(name, ("no tensor", ""))
    allowed = {"floats": (rows, columns)} if source["linear_class"] == "autobitlinear" else {}
    if not is_online(source):
        allowed["U8"] = (rows // 4, columns)
    if allowed.get("floats" if dtype in _FLOATS else dtype) != shape or (dtype == "U8" and rows % 4):
        wanted = " or ".join(f"{kind} {size}" for kind, size in allowed.items())
        problems.append(f"{name}: {dtype} {shape} instead of {wanted}")
    dtype, shape = found.get(layer + "weight_scale", (None, ()))
    if is_online(source) and dtype is not None:
        problems.append(f"{layer}weight_scale, where weights are ternarised online")
    if not is_online(source) and (dtype not in _FLOATS or math.prod(shape) != 1):
        problems.append(f"{layer}weight_scale: {dtype or 'no tensor'} {shape} instead of one float")
    if source["use_rms_norm"] and found.get(layer + "rms_norm.weight", (None, ()))[1] != (columns,):
        problems.append(f"{layer}rms_norm.weight is not there with {columns} elements")
    return problems


class CanonicalOnArrival(ConversionOps):
    """{pattern: [tensor]} of the weight (and weight_scale) of one module -> what its parameters are to be, by full name.
    Floats are first rounded to the dtype that the model is loaded in, as transformers does."""

    def __init__(self, quantizer):
        self.hf_quantizer = quantizer

    @torch.no_grad()
    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        quantizer, name = self.hf_quantizer, full_layer_name
        tensors = {p.rpartition(".")[2]: t[0] if isinstance(t, list) else t for p, t in input_dict.items()}
        module, _ = get_module_from_name(model, name)
        dtype = transformers_dtypes.loaded_dtype(model, name, module.weight.dtype)
        tensors = {part: t.to(dtype) if t.is_floating_point() else t for part, t in tensors.items()}
        if name not in quantizer._weights:
            return {name: tensors["weight"]}
        weight, _ = quantizer._weights[name]
        scale = tensors.get("weight_scale")
        quantizer._heap.count(tensors["weight"].nbytes)
        try:
            if not all(t.isfinite().all() for t in tensors.values()) or (scale is not None and not scale.all()):
                raise ValueError("NaN or infinity in the weight, or a weight_scale of 0")
            parts = canonical_of_bitnet(
                tensors["weight"],
                scale,
                out_features=weight.out_features,
                linear_class=quantizer.quantization_config.source["linear_class"],
                format=weight.format,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if quantizer.quantization_config.dequantize:
            return {name: weight.format.dequantize(parts, weight.in_features, dtype)}
        layer = name.removesuffix("weight")
        placeholder = tensors["weight"].new_zeros(PLACEHOLDER_SHAPE, dtype=dtype)
        return {name: placeholder, **{layer + part: tensor for part, tensor in parts.items()}}

    @property
    def reverse_op(self):
        return _IdentityOp()


def finish(model) -> None:
    """Forgets how the model was read, so that it is saved as it is now."""
    model._weight_conversions = [
        c
        for c in model._weight_conversions or []
        if not any(isinstance(op, CanonicalOnArrival) for op in getattr(c, "operations", ()))
    ]
