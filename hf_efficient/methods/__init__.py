"""Quantization methods: each chooses the codes, scales and zero points of one weight. One file a method (a paper); the
name in a config selects it. Files that begin with an underscore hold what several methods share.

A method is a module with these attributes:

    FORMATS: tuple of `Format` classes whose weights it can quantize.
    NEEDS: tuple of names of `LinearInputs` attributes that it cannot do without, for example ("hessian",). () for a
        data-free method, which runs on each weight as it is loaded.
    USES (optional, default ()): names of `LinearInputs` attributes that improve its result where calibration ran.
    FLOAT_ZERO (optional, default False): whether it also serves affine formats with zero_point="float".
    MASKED (optional, default False): whether `quantize` takes the argument `mask`.

    quantize(weight, format, inputs=None[, mask=None]) -> dict[str, Tensor]

        weight: float16, bfloat16 or float32 [N, K] (out_features, in_features), finite; not changed.
        format: an instance of one of FORMATS.
        inputs: `LinearInputs` of the layer, or None where nothing was observed and NEEDS is ().
        mask: bool [N, K] of a pruned weight, True = kept. The others dequantize to 0.
        Returns the canonical tensors of `format`: names and shapes as `format.shapes(N, K)`, dtypes as
        `format.dtypes(weight.dtype)`, on the weight's device. "qweight" holds the codes, "scale" and "zero_point" what
        `format.dequantize` undoes them with.
        Raises ValueError for a weight or a format that the method cannot serve.
"""

import importlib

import torch

from hf_efficient.kernels.hadamard import random_signs, rotate


def get_method(name: str):
    """The module of the method `name` (see `available_methods` of `hf_efficient.configs`)."""
    return importlib.import_module(f"hf_efficient.methods.{name}")


def inner_format(format):
    """The format in which the weight itself is stored: `format.inner` of a `TransformedFormat`, else `format`."""
    return getattr(format, "inner", format)


def quantize(
    weight: torch.Tensor, format, method: str, inputs=None, transform=None, mask=None
) -> dict[str, torch.Tensor]:
    """The canonical tensors that `method` chooses for weight [N, K] in `format`.

    Args:
        weight: float16, bfloat16 or float32 [N, K].
        inputs: `LinearInputs` of the layer, for methods that need them.
        transform: for a `TransformedFormat`, its own tensors: "input_scale" [K] and "rotation_signs" int8 [K] (by
            default the same random signs for every weight of that width). The weight and the statistics are transformed
            here.
        mask: bool [N, K] of a pruned weight, True = kept: the codes of the others mean nothing.

    Raises:
        ValueError: the method does not serve the format, the weight is not finite, or in the format it would not be.
    """
    check_serves(method, format)
    module, inner = get_method(method), inner_format(format)
    if not weight.isfinite().all():
        raise ValueError(f"the weight has {(~weight.isfinite()).sum().item()} values that are NaN or infinite")
    if inner is format:
        masked = {"mask": mask} if mask is not None and getattr(module, "MASKED", False) else {}
        tensors = module.quantize(weight, format, inputs, **masked)
    else:
        changed, inputs, own = _transformed(weight, format, inputs, transform or {})
        tensors = {**module.quantize(changed, inner, inputs), **own}
    largest, dtype = weight.abs().amax().item(), weight.dtype
    is_huge = largest > torch.finfo(dtype).max ** 0.5
    if is_huge and not format.dequantize(tensors, weight.shape[1], dtype).isfinite().all():
        raise ValueError(f"method={method!r}: weights of up to {largest:.3g} overflow {dtype} in {format}")
    return tensors


def check_serves(method: str, format) -> None:
    """Raises ValueError where `method` cannot choose the codes of `format`."""
    module, inner = get_method(method), inner_format(format)
    if not isinstance(inner, module.FORMATS):
        served = ", ".join(kind.__name__ for kind in module.FORMATS)
        raise ValueError(f"method={method!r} does not serve {inner}: it serves {served}")
    if format.adopted:
        raise ValueError(
            f"{format} is read from checkpoints of other libraries (hf_efficient.adopt): no method chooses a "
            "scale_dtype, minima or an input_order"
        )
    if getattr(inner, "zero_point", None) == "float" and not getattr(module, "FLOAT_ZERO", False):
        raise ValueError(
            f"method={method!r} chooses integers: zero_point='float' is not supported here, but for method='hqq'"
        )


def _transformed(weight, format, inputs, transform):
    """(weight, inputs, the transform's canonical tensors) after the transforms of `format`, a `TransformedFormat`."""
    own, dtype = {}, weight.dtype
    if format.input_scale:
        if "input_scale" not in transform:
            raise ValueError("input_scale=True is not supported here: calibration sets it, it cannot be asked for")
        scale = own["input_scale"] = transform["input_scale"].to(dtype)
        weight = weight.float() / scale.float()
        inputs = None if inputs is None else inputs.scaled(scale.float())
    if format.rotation:
        signs = transform.get("rotation_signs")
        signs = random_signs(weight.shape[1]) if signs is None else signs
        signs = own["rotation_signs"] = signs.to(weight.device)
        weight = rotate(weight.float(), signs.to(weight.device, torch.float32))
        inputs = None if inputs is None else inputs.rotated(lambda rows: rotate(rows, signs.to(rows.device)))
    return weight.to(dtype), inputs, own
