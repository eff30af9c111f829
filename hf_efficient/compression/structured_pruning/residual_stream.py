"""One pass over the calibration text that chooses which layers, and which part of the residual stream, stay."""

from contextlib import ExitStack

import torch
from torch import nn

from hf_efficient.calibration.blocks import first_tensor, hidden_argument, weight_of, without_cache
from hf_efficient.compression.structured_pruning.anatomy import LINEAR, Anatomy, input_axis
from hf_efficient.observers.hooks import watching_inputs, watching_outputs
from hf_efficient.observers.linear_inputs import LinearInputs
from hf_efficient.pruning.structured import shape, slicegpt
from hf_efficient.pruning.structured.basis import Basis, Moments
from hf_efficient.pruning.structured.shapes import Shape


@torch.no_grad()
def observe_stream(
    anatomy: Anatomy, method: str, new: Shape, axes: dict[str, tuple[int, ...]]
) -> tuple[list[int], Basis | None]:
    """(indices of the layers that stay, the basis of the residual stream or None where the hidden size stays) for a
    model of shape `new`.

    axes: key of a parameter -> its axes along the residual stream (see `Anatomy.hidden_axes`); {} where it stays."""
    model, old, device = anatomy.model, anatomy.shape, anatomy.model.device
    owners = {key.rpartition(".")[0] for key in axes}
    cut = {name: module for name, module in model.named_modules() if anatomy.key(name) in owners}
    norms = {name: module for name, module in cut.items() if not isinstance(module, (*LINEAR, nn.Embedding))}
    readers = {
        name: module
        for name, module in cut.items()
        if isinstance(module, LINEAR) and input_axis(module) in axes.get(anatomy.key(f"{name}.weight"), ())
    }
    moments = Moments(old.hidden_size, method == "slicegpt", device)
    inputs = {name: LinearInputs(old.hidden_size, hessian=False, device=device) for name in readers}
    turns = torch.zeros(old.num_hidden_layers, dtype=torch.float32)

    def turned(layer: int, args, kwargs, output) -> None:
        turns[layer] += shape.turn(hidden_argument(args, kwargs), first_tensor(output)).cpu()

    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        stack.enter_context(watching_inputs(norms, lambda _, x: moments.update(x)))
        stack.enter_context(watching_outputs(dict(enumerate(anatomy.chain.modules)), turned))
        if method == "shape":
            stack.enter_context(watching_inputs(readers, lambda name, x: inputs[name].update(x)))
        for batch in anatomy.batches_on_device():
            model(**batch)
    layers = shape.kept_layers(turns.tolist(), new.num_hidden_layers)
    if method == "slicegpt":
        return layers, slicegpt.basis(moments, new.hidden_size)
    if not axes:
        return layers, None
    squares = {name: weight_of(module).float().square().sum(0) for name, module in readers.items()}
    importance = sum(seen.mean_square * squares[name] for name, seen in inputs.items())
    return layers, Basis.selecting(moments.mean_square, importance, new.hidden_size)
