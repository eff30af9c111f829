"""Tensor parallelism: transformers' `tp_plan`, extended to the packed tensors that stand for a weight.

A layer that `tp_plan` cuts by output columns ("colwise") keeps some rows of every canonical tensor, one that it cuts
by input ("rowwise") some groups of every row, so that each process computes with codes and scales of the whole model.
transformers reads only a process's part of a compressed checkpoint; a model that is compressed while it loads is
compressed whole in every process, a weight at a time. After loading the parts are ordinary tensors and the layer
computes as any other.

Expert parallelism: with `ep_size` as large as `tp_size` each process holds some whole experts, by transformers'
`ep_plan`, which sends tokens there or sums what the processes computed.
"""

import dataclasses

import torch
from torch import nn

from hf_efficient.experts import EfficientExperts
from hf_efficient.formats import AffineFormat, Format
from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.sparse24 import PLACES_COLUMNS, Sparse24Format
from hf_efficient.formats.transformed import ROUNDED_COLUMNS, TransformedFormat
from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format
from hf_efficient.integrations import transformers_releases
from hf_efficient.layers import CompressedModule, CompressedWeight


ALL_PARALLEL_STYLES, _get_parameter_plan, DtensorShardOperation, TensorParallelLayer = (
    transformers_releases.parallel_utils()
)
ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")  # styles that cut output features
COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input")  # and input features
INT8_COLUMNS = 64  # inputs that `int8_on_cpu` gives one scale


class Cut(TensorParallelLayer):
    """How one tensor of a module is cut where the module itself has transformers' style `base`: a canonical tensor as
    its format says, the placeholder not at all, a tensor of an ordinary module as `base` does."""

    def __init__(self, base: str):
        self.base = base

    def shard_param(self, module, param, mesh):
        style = ALL_PARALLEL_STYLES[self.base]
        weight, part = _weight_of(module, param)
        if weight is None:
            return style.shard_param(module, param, mesh)
        dim = None if part is None else _dims(weight, self.base)[part]
        if dim is not None:
            from torch.distributed.tensor import Shard, distribute_tensor
            from torch.distributed.tensor.placement_types import _StridedShard

            place = dim + (weight.experts is not None)
            packed = self.base == "packed_colwise"
            placement = _StridedShard(place, split_factor=style.split_factor) if packed else Shard(place)
            cut = distribute_tensor(module._parameters[param], mesh, [placement], src_data_rank=None)
            module._parameters[param] = nn.Parameter(cut, requires_grad=False)


class OwnExperts(TensorParallelLayer):
    """What transformers' style of expert weights does to their module, for the placeholder of compressed ones: their
    canonical tensors have that style themselves."""

    def shard_param(self, module, param, mesh):
        module.num_experts = module.compressed_weights()[0].experts // mesh.size()
        module._is_expert_parallel = True


def register() -> None:
    """Registers a `Cut` for every style that cuts weights. Idempotent."""
    if ALL_PARALLEL_STYLES is None:
        return  # `check` refuses what would need them
    ALL_PARALLEL_STYLES.register("efficient_experts", OwnExperts())
    for base in (*ROWS, *COLUMNS):
        ALL_PARALLEL_STYLES.register(f"efficient_{base}", Cut(base))


def check(model, config, pre_quantized: bool, own: bool) -> None:
    """Raises ValueError for a `distributed_config` that compressed weights do not support, before anything is
    changed. `own`: the checkpoint is no other library's."""
    distributed = getattr(model.config, "distributed_config", None)
    ep_size = _ep_size(model)
    if ep_size not in (1, _size(model)):
        raise ValueError(
            f"distributed_config: ep_size={ep_size}: compressed experts are spread over the processes that share a "
            f"batch: it must be 1 or tp_size, which is {_size(model)}; for several devices in one process there is "
            "device_map='auto'"
        )
    for axis in ("pp_size", "fsdp_size", "dp_replicate_size"):
        if (getattr(distributed, axis, None) or 1) > 1:
            raise ValueError(
                f"distributed_config: {axis}={getattr(distributed, axis)} shards weights over processes in a way that "
                "compressed weights do not support: it must be 1; tp_size may be larger, and for several devices in "
                "one process there is device_map='auto'"
            )
    if _size(model) == 1:
        return
    transformers_releases.needs("5.23", f"tp_size={_size(model)}: tensor parallelism of compressed weights")
    if isinstance(distributed.tp_plan, dict):
        raise ValueError("distributed_config: tp_plan must be 'auto' for compressed weights, not a plan of your own")
    if getattr(config, "embeddings", False):
        raise ValueError(
            f"tp_size={_size(model)}: embeddings=True is not supported, since the rows of one embedding serve all "
            "processes: quantize without it for tensor parallelism"
        )
    if not own:
        raise ValueError(
            "tp_size > 1 is not supported for a checkpoint of another library: adopt it in one process and save it "
            "first"
        )
    if pre_quantized and config.dequantize:
        raise ValueError("dequantize=True is not supported with tp_size > 1: dequantize in one process and save")


def update_plan(model, plan: dict[str, str], calibrated) -> None:
    """Adds to `plan` how the tensors of compressed modules are cut. `calibrated` names modules compressed after
    loading.

    Raises:
        ValueError: a module's weight cannot be cut; names it, its format and why.
    """
    size = _size(model)
    if size > 1 and calibrated:
        raise ValueError(
            f"tp_size={size}: methods that need calibration run in one process; save what they give and load that "
            "with tp_size"
        )
    for name, module in model.named_modules():
        if size == 1 or not isinstance(module, CompressedModule):
            continue
        module._hf_quantized_needs_local_tp = True
        if isinstance(module, EfficientExperts) and _ep_size(model) > 1:
            continue  # `update_expert_plan` says
        for weight in module.compressed_weights():
            own = weight.prefix[:-1] or "weight"
            style = _get_parameter_plan(f"{name}.{own}", plan)
            base = style and style.removeprefix("efficient_")
            if style is None:
                continue
            if base not in (*ROWS, *COLUMNS):
                if style != "moe_tp_experts":
                    raise ValueError(
                        f"tp_plan: {name} has the style {style!r}, which compressed weights do not support"
                    )
                raise ValueError(f"tp_plan: the plan of {type(model).__name__} cuts no weight of {name}")
            if error := _error(module, weight, base, size):
                raise ValueError(
                    f"tp_size={size}: {name}.{own} [{weight.out_features}, {weight.in_features}] in {weight.format} "
                    f"cannot be cut {base}: {error}"
                )
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            for parameter in (own, *weight.names().values()):
                plan[f"{pattern}.{parameter}"] = f"efficient_{base}"


def update_expert_plan(model, plan: dict[str, str]) -> None:
    """Adds to the `ep_plan` that each process keeps some experts of every canonical tensor.

    Raises:
        ValueError: the experts of a module cannot be spread evenly.
    """
    size = _ep_size(model)
    for name, module in model.named_modules() if size > 1 else ():
        if not isinstance(module, EfficientExperts):
            continue
        for weight in module.compressed_weights():
            own = weight.prefix[:-1]
            if weight.format.experts is not None:
                raise ValueError(f"ep_size={size}: the experts of {name} have different numbers of bits")
            if _get_parameter_plan(f"{name}.{own}", plan) not in ("grouped_gemm", "efficient_experts"):
                raise ValueError(f"ep_plan: the plan of {type(model).__name__} spreads no experts of {name}")
            if weight.experts % size:
                raise ValueError(f"ep_size={size}: the {weight.experts} experts of {name} are not divisible by it")
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            plan[f"{pattern}.{own}"] = "efficient_experts"
            plan.update({f"{pattern}.{parameter}": "grouped_gemm" for parameter in weight.names().values()})


def own_parts(model, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of whole tensors by full name, what this process keeps."""
    if _size(model) == 1:
        return tensors
    from torch.distributed.tensor import DTensor

    parts = {}
    for name, tensor in tensors.items():
        path, _, parameter = name.rpartition(".")
        placed = model.get_submodule(path)._parameters.get(parameter)
        parts[name] = DtensorShardOperation(placed).shard_tensor(tensor) if isinstance(placed, DTensor) else tensor
    return parts


def localize(model) -> bool:
    """Turns what this process holds of compressed weights into ordinary tensors; returns whether the model is cut."""
    if _size(model) == 1:
        return False
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if not isinstance(module, CompressedModule):
            continue
        for prefix, weight in module._compressed.items():
            shapes = {}
            for part, parameter in weight.names().items():
                placed = module._parameters[parameter]
                if isinstance(placed, DTensor):
                    shapes[part] = [full // own for full, own in zip(placed.shape, placed.to_local().shape)]
                    module._parameters[parameter] = nn.Parameter(placed.to_local(), requires_grad=False)
            *experts, rows, columns = shapes.get("qweight", [1, 1])
            cut = {"out_features": weight.out_features // rows, "in_features": weight.in_features // columns}
            if weight.experts is not None:
                cut["experts"] = weight.experts // (experts or [1])[0]
            module._compressed[prefix] = dataclasses.replace(weight, **cut)
    return True


def refuse_saving(model) -> None:
    """Makes `save_pretrained` and `push_to_hub` of a model that is cut raise."""

    def refuse(*args, **kwargs):
        raise ValueError(
            "this process holds a part of each compressed weight: save from a process that loads the model without "
            "tp_size"
        )

    model.save_pretrained = model.push_to_hub = refuse


def _ep_size(model) -> int:
    return getattr(getattr(model.config, "distributed_config", None), "ep_size", None) or 1


def _size(model) -> int:
    return getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1


def _weight_of(module, parameter: str) -> tuple[CompressedWeight | None, str | None]:
    """(the compressed weight that a parameter belongs to, the canonical tensor it is or None for the placeholder)"""
    for weight in module.compressed_weights() if isinstance(module, CompressedModule) else ():
        if parameter == (weight.prefix[:-1] or "weight"):
            return weight, None
        for part, name in weight.names().items():
            if name == parameter:
                return weight, part
    return None, None


def _dims(weight: CompressedWeight, style: str) -> dict[str, int | None]:
    """Canonical tensor -> the dimension (of one expert's) that is cut, None: every process has all of it."""
    shapes = weight.format.shapes(weight.out_features, weight.in_features)
    dim = 0 if style in ROWS else 1
    whole = {
        "activation_scale",
        "activation_zero_point",
        "outlier_columns",
        "rotation_signs",
        "input_order",
        "scale_scale",
    }
    whole |= {"input_order", *(("input_scale",) if dim == 0 else ("codebook",))}

    def of(name: str, shape: tuple[int, ...]) -> int | None:
        if name == "input_scale" and dim == 1:  # [in_features]
            return 0
        return None if name in whole or shape[dim] == 1 else dim

    return {name: of(name, shape) for name, shape in shapes.items()}


def _error(module, weight: CompressedWeight, style: str, size: int) -> str | None:
    """Why `weight` cannot be cut into `size` parts, or None."""
    if whole := getattr(weight.format, "inner", weight.format).whole:
        return whole
    if isinstance(module, EfficientExperts) and module.is_transposed:
        return "the experts of this architecture are stored transposed"
    wide, features = ("out_features", weight.out_features) if style in ROWS else ("in_features", weight.in_features)
    if features % (size * (2 if style == "packed_colwise" else 1)):
        return f"{wide}={features} is not divisible by it"
    rows = style in ROWS
    return _rows_error(weight.format, features // size) if rows else _columns_error(weight.format, features // size)


def _rows_error(format: Format, rows: int) -> str | None:
    format = format.inner if isinstance(format, TransformedFormat) else format
    if getattr(format, "double_quantization", False):
        return "double_quantization shares a scale between rows"
    if isinstance(format, BitmapFormat):
        return "its kept weights are one stream"
    if getattr(format, "weights", None) == "block" and rows % BLOCK:
        return f"a part has {rows} rows, and {BLOCK} of them share a scale"
    return None


def _columns_error(format: Format, columns: int) -> str | None:
    if isinstance(format, TransformedFormat):
        if format.input_bits is not None and columns % ROUNDED_COLUMNS:
            return f"a part has {columns} inputs, and {ROUNDED_COLUMNS} of them share a grid"
        mixes = "rotate mixes all inputs" if format.rotation else "its inputs are put in another order"
        return mixes if format.rotation or format.input_order else _columns_error(format.inner, columns)
    if isinstance(format, BitmapFormat):
        return "its kept weights are one stream"
    if isinstance(format, Sparse24Format):
        wide = PLACES_COLUMNS if format.weights is None else 4 * PLACES_COLUMNS
        if columns % wide:
            return f"a part has {columns} inputs, no multiple of {wide}"
        return None if format.weights is None else _columns_error(format.weights, columns)
    if isinstance(format, (AffineFormat, CodebookFormat)):
        if getattr(format, "double_quantization", False):
            return "double_quantization shares a scale between groups of many rows"
        groups = 8 if format.group_size in (None, -1) else format.group_size
        if getattr(format, "int8_on_cpu", False) is True:
            groups = max(groups, INT8_COLUMNS)
        return f"a part has {columns} inputs, no multiple of {groups}" if columns % groups else None
    if isinstance(format, (Int8Format, Float8Format)) and not format.outlier_columns:
        if getattr(format, "weights", None) == "block":
            return f"a part has {columns} inputs, and {BLOCK} of them share a scale" if columns % BLOCK else None
        if format.static and getattr(format, "outlier_threshold", None) is None:
            return None
    return "it rounds inputs with what it knows of a whole row of them"
