"""Fits the remaining linears by least squares, to compensate for the pruning of their block and for errors of earlier
blocks.

The linears of a block are solved one stage (linears that read one tensor) after another, on the inputs that the smaller
model computes by then. A linear that reads the residual stream is solved towards its outputs in the dense model. One
that writes to the stream is solved towards the dense stream itself, so it also makes up for earlier errors, and the
last one of a block for layers that are left out behind it."""

import torch

from hf_efficient.calibration.blocks import Chain, first_tensor, weight_of
from hf_efficient.compression.structured_pruning.cutting import cut_units
from hf_efficient.compression.structured_pruning.streams import Streams
from hf_efficient.observers.hooks import watching_outputs
from hf_efficient.pruning.structured.least_squares import Correction


@torch.no_grad()
def repair(streams: Streams, layer: int, kept: dict[str, torch.Tensor], stages: list[list[str]]) -> None:
    """Changes the weights of `layer` in the smaller model, where `streams` stands.

    Args:
        kept: reader -> bool [G, R] of the units that stay in this layer.
        stages: names of linears to solve, those that read one tensor together, in the order they are called.
    """
    anatomy = streams.anatomy
    for names in stages:
        ends_block = names is stages[-1] and names[0] in anatomy.groups and anatomy.adds
        corrections = {name: Correction() for name in names}
        for batch in range(len(streams.dense)):
            small = streams.small[batch]
            inputs, outputs, result = _watched(streams.small_chain, layer, batch, small, names, whole=ends_block)
            device = outputs[names[0]].device
            wanted = streams.cut(streams.wanted[batch]).to(device).float()
            weight = 1 / wanted.square().mean(-1).clamp_min(1e-12)  # the next norm divides a token by its size
            if ends_block:
                errors = {name: wanted - result.float() for name in names}
            else:
                dense = _watched(streams.chain, layer, batch, streams.dense[batch], names)[1]
                errors = {n: _cut_output(streams, n, dense[n], kept, batch) - outputs[n].float() for n in names}
            for name, correction in corrections.items():
                correction.update(inputs[name].flatten(0, -2), errors[name].flatten(0, -2), weight.flatten())
        for name, correction in corrections.items():
            own = weight_of(streams.small_chain.modules[layer].get_submodule(name))
            own.copy_(own.float() + correction.solve())


def _cut_output(streams: Streams, name: str, output: torch.Tensor, kept: dict, batch: int) -> torch.Tensor:
    """What the linear `name` of the smaller model should give, float32: its `output` [B, T, N] in the dense model
    without the rows that go. If it writes to the residual stream, what the smaller stream lacks so far is added."""
    anatomy = streams.anatomy
    if name not in anatomy.groups:
        rows = cut_units(anatomy, f"{name}.bias", torch.arange(output.shape[-1]), kept)
        return output[..., rows.to(output.device)].float()
    wanted = streams.cut(output).float()
    if anatomy.adds:
        lacking = streams.cut(streams.dense[batch]).float() - streams.small[batch].float()
        wanted += lacking.to(wanted.device)
    return wanted


class _LastLinearReached(Exception):
    """Ends a block early: nothing behind its last watched linear is needed."""


def _watched(chain: Chain, layer: int, batch: int, hidden: torch.Tensor, names: list[str], whole: bool = False):
    """(inputs by name, outputs by name, the block's output) of some linears of a block; the last is None unless
    `whole`, which runs the block to its end."""
    inputs, outputs, result = {}, {}, None

    def see(name, args, kwargs, output) -> None:
        inputs[name], outputs[name] = args[0], output
        if len(outputs) == len(names) and not whole:
            raise _LastLinearReached

    with watching_outputs({name: chain.modules[layer].get_submodule(name) for name in names}, see):
        try:
            result = first_tensor(chain.call(layer, batch, hidden))
        except _LastLinearReached:
            pass
    return inputs, outputs, result


def stages_of(streams: Streams) -> list[list[str]]:
    """The linears of a block in the order they are called, those that read one tensor together."""
    inputs, _, _ = _watched(streams.chain, 0, 0, streams.wanted[0], streams.anatomy.linears)
    stages: dict[int, list[str]] = {}
    for name, x in inputs.items():  # in the order of calls; all inputs are alive, so no two have one id
        stages.setdefault(id(x), []).append(name)
    return list(stages.values())
