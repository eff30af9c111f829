"""Scales of activations that stay fixed when the model runs."""

from contextlib import ExitStack

import torch

from hf_efficient.kernels.hadamard import rotate
from hf_efficient.observers.absmax import AbsMaxObserver
from hf_efficient.observers.entropy import EntropyObserver
from hf_efficient.observers.mse import MSEObserver
from hf_efficient.observers.percentile import PercentileObserver


_OBSERVERS = {"absmax": AbsMaxObserver, "entropy": EntropyObserver, "mse": MSEObserver}


@torch.no_grad()
def observe(block, batches: int | None = None, make=None) -> dict[str, dict[str, torch.Tensor]]:
    """Runs all batches of a `Block` and observes the inputs of its linears with static activations.

    Args:
        block: its linears are the original ones; formats and schemes (`W8A8Config`s) say what to observe and how. Inputs are
            observed as they are rounded: after the input scale and the rotation in `block.tensors`.
        batches: how many to run, by default one for each of the block's inputs.
        make: makes the observer of one linear, called with (its config, symmetric); by default what the config asks for.

    Returns:
        name of a linear -> "activation_scale" float32 [1] and, for asymmetric inputs, "activation_zero_point" int8 [1]; what
        is missing from its canonical tensors.

    Raises:
        ValueError: fused experts, whose inputs are not observed; a linear that no token reached; NaN or infinity in an input;
            names the layer.
    """
    observers = {}
    for name, format in block.formats.items():
        if not getattr(_inner(format), "static", False):
            continue
        if name in block.experts:
            raise ValueError(f"{name}: activations='static' is not supported for fused experts: it must be 'dynamic'")
        symmetric = not getattr(_inner(format), "asymmetric", False)
        observers[name] = (make or observer_of)(block.schemes[name], symmetric)
    with ExitStack() as stack:
        for name, observer in observers.items():
            hook = block.linears[name].register_forward_pre_hook(
                lambda _, args, name=name, observer=observer: _see(name, observer, args[0], block)
            )
            stack.callback(hook.remove)
        for batch in range((len(block.inputs) if batches is None else batches) if observers else 0):
            block.run(batch)
    return {name: _tensors_of(name, observer, block) for name, observer in observers.items()}


def observer_of(config, symmetric: bool):
    """The observer that a `W8A8Config` asks for, of one range for the tensor."""
    if config.observer == "percentile":
        return PercentileObserver("tensor", symmetric, config.percentile)
    return _OBSERVERS[config.observer or "absmax"]("tensor", symmetric)


def activation_tensors(low: torch.Tensor, high: torch.Tensor, format) -> dict[str, torch.Tensor]:
    """The canonical tensors of static inputs that span [low, high], float32 [1] each: the scale and zero point that dynamic
    quantization takes for a token with that range."""
    low, high = low.float().clamp_max(0), high.float().clamp_min(0)
    if getattr(format, "asymmetric", False):
        scale = ((high - low) * (1 / 255)).clamp_min(2.0**-100)
        zero = ((-low * (1 / scale)).clamp_(0, 255).round_() - 128).to(torch.int8)
        return {"activation_scale": scale, "activation_zero_point": zero}
    return {"activation_scale": (torch.maximum(-low, high) * (1 / format.largest)).clamp_min(2.0**-100)}


def _inner(format):
    return getattr(format, "inner", format)


def _tensors_of(name: str, observer, block) -> dict[str, torch.Tensor]:
    try:
        return activation_tensors(*observer.range(), _inner(block.formats[name]))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _see(name: str, observer, x: torch.Tensor, block) -> None:
    tensors = block.tensors[name]
    if "input_scale" in tensors:
        x = x * tensors["input_scale"].to(x.device, x.dtype)
    if "rotation_signs" in tensors:
        x = rotate(x, tensors["rotation_signs"].to(x.device, x.dtype))
    try:
        observer.update(x)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
