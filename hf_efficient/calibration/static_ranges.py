"""Static activation scales: chosen on calibration data, fixed when the model runs."""

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch

from hf_efficient.calibration.routed_inputs import RoutedInputs, watching_routes
from hf_efficient.configs.checks import naming
from hf_efficient.kernels.hadamard import rotate
from hf_efficient.methods import inner_format
from hf_efficient.observers.absmax import AbsMaxObserver
from hf_efficient.observers.entropy import EntropyObserver
from hf_efficient.observers.hooks import watching_inputs
from hf_efficient.observers.mse import MSEObserver
from hf_efficient.observers.percentile import PercentileObserver


_OBSERVERS = {"absmax": AbsMaxObserver, "entropy": EntropyObserver, "mse": MSEObserver}


@torch.no_grad()
def observe(block, batches: int | None = None, keep: Callable | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Runs batches of a `Block` and observes the inputs of its linears and fused experts with static activations.

    Args:
        block: a `Block` with its original linears. Its formats say which inputs to observe, its schemes (`W8A8Config`)
            how. The input scale and the rotation in `block.tensors` are applied first, because rounding comes after
            them.
        batches: number of batches to run, by default all of `block.inputs`.
        keep: where the hidden states into experts are kept; see `collect`.

    Returns:
        name of a linear -> the canonical tensors still missing: "activation_scale" float32 [1] and, for asymmetric
        inputs, "activation_zero_point" int8 [1]. Name of an expert weight -> the same of all experts, [E, 1]; an expert
        that no row reached has those of the rows of all others.

    Raises:
        ValueError: a linear that no token reached, or experts that none did; NaN or infinity in an input. Names the
            layer.
    """
    observers, experts = {}, []
    for name, format in block.formats.items():
        inner = inner_format(format)
        if not getattr(inner, "static", False):
            continue
        if name in block.experts:
            experts.append(name)
            continue
        observers[name] = _observer_of(block.schemes[name], not getattr(inner, "asymmetric", False))

    def see(name: str, x: torch.Tensor) -> None:
        tensors = block.tensors[name]
        if "input_scale" in tensors:
            x = x * tensors["input_scale"].to(x.device, x.dtype)
        if "rotation_signs" in tensors:
            x = rotate(x, tensors["rotation_signs"].to(x.device, x.dtype))
        with naming(name):
            observers[name].update(x)

    found = {}
    with ExitStack() as stack:
        stack.enter_context(watching_inputs({name: block.linears[name] for name in observers}, see))
        keeps = {name: keep and functools.partial(keep, f"{name}.static") for name in experts}
        routes = {name: stack.enter_context(watching_routes(block.experts[name], keeps[name])) for name in experts}
        for batch in range((len(block.inputs) if batches is None else batches) if observers or experts else 0):
            block.run(batch)
    for name, rows in routes.items():
        for inputs in rows.inputs(name, hessian=False):
            found[inputs.name] = _of_experts(inputs, block.schemes[name], block.formats[name], block.tensors)
    for name, observer in observers.items():
        with naming(name):
            found[name] = activation_tensors(*observer.range(), inner_format(block.formats[name]))
    return found


def _of_experts(inputs: RoutedInputs, scheme, format, tensors: dict) -> dict[str, torch.Tensor]:
    """The canonical tensors of the inputs of one weight of all experts, stacked."""
    inner, signs = inner_format(format), tensors[inputs.name].get("rotation_signs")
    symmetric, reached = not getattr(inner, "asymmetric", False), inputs.rows.counts.nonzero().flatten().tolist()
    if not reached:
        raise ValueError(f"{inputs.name}: no activations were seen")
    together, found = _observer_of(scheme, symmetric), {}
    for expert in reached:
        observer = _observer_of(scheme, symmetric)
        for rows in inputs.of(expert):
            if signs is not None:
                rows = rotate(rows, signs[expert].to(rows.device, rows.dtype))
            with naming(f"{inputs.name}[{expert}]"):
                observer.update(rows)
                if inputs.unreached:
                    together.update(rows)
        found[expert] = activation_tensors(*observer.range(), inner)
    others = activation_tensors(*together.range(), inner) if inputs.unreached else None
    each = [found.get(expert, others) for expert in range(len(inputs))]
    return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]}


def _observer_of(config, symmetric: bool):
    """The observer that a `W8A8Config` names, of one range for the whole tensor."""
    if config.observer == "percentile":
        return PercentileObserver("tensor", symmetric, config.percentile)
    best = "absmax" if config.dtype != "int8" or config.method == "smoothquant" else "mse"
    return _OBSERVERS[config.observer or best]("tensor", symmetric)


def activation_tensors(low: torch.Tensor, high: torch.Tensor, format) -> dict[str, torch.Tensor]:
    """The canonical tensors of static inputs in the range [low, high], float32 [1] each: the scale and zero point that
    dynamic quantization computes for a token of that range."""
    low, high = low.float().clamp_max(0), high.float().clamp_min(0)
    if getattr(format, "asymmetric", False):
        scale = ((high - low) * (1 / 255)).clamp_min(2.0**-100)
        zero = ((-low * (1 / scale)).clamp_(0, 255).round_() - 128).to(torch.int8)
        return {"activation_scale": scale, "activation_zero_point": zero}
    return {"activation_scale": (torch.maximum(-low, high) * (1 / format.largest_input)).clamp_min(2.0**-100)}
