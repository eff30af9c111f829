"""Solves the linears of a block anew, one stage after another: what reads a cut residual stream towards what it gives in the
dense model, what writes to the stream towards the dense stream, so that it also makes up for what went wrong before it and for
layers that are left out behind it."""

import dataclasses
from contextlib import ExitStack

import torch

from hf_efficient.calibration.blocks import Chain, first_tensor, weight_of, without_cache
from hf_efficient.compression.structured_pruning.anatomy import Anatomy
from hf_efficient.compression.structured_pruning.cutting import Cutter, cut_units
from hf_efficient.pruning.structured.least_squares import Correction


class Streams:
    """Hidden states [B, T, H] a batch, on the CPU.

    Attributes:
        dense: of the dense model into a layer. wanted: of it into the next layer that stays. small: of the smaller model.
    """

    def __init__(self, anatomy: Anatomy, cutter: Cutter):
        self.anatomy, self.cutter, self.basis = anatomy, cutter, cutter.basis
        self.chain = anatomy.chain
        self.wanted = anatomy.followed.record(self.chain)
        self.small = [self.cut(hidden) for hidden in self.wanted]
        blocks, forms = cutter.blocks, [self.chain.forms[layer] for layer in cutter.layers]
        batch = {name: value.to(cutter.small.device) for name, value in anatomy.batches[0].items()}
        own = Chain(self.chain.names[: len(blocks)], blocks, forms, [[] for _ in blocks])
        with without_cache(cutter.small):
            (first,) = own.record(lambda _: cutter.small(**batch), 1)
        if not torch.allclose(first.float(), self.small[0].float(), rtol=0.02, atol=0.02 * first.abs().max().item()):
            raise ValueError(
                f"{type(cutter.small).__name__} scales its embedding by its hidden_size, which cannot become another one"
            )
        modules = dict(zip(cutter.layers, blocks))
        self.small_chain = dataclasses.replace(self.chain, modules=modules, carried=[{} for _ in self.wanted])

    def cut(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.basis is None else self.basis.cut(hidden, -1)

    @torch.no_grad()
    def enter(self, layer: int, following: int) -> None:
        """Runs the dense model on, from `layer` into the layer `following`."""
        self.dense = self.wanted
        for index in range(layer, following):
            self.wanted = [self.chain.advance(index, batch, states) for batch, states in enumerate(self.wanted)]

    @torch.no_grad()
    def leave(self, layer: int) -> None:
        """Runs the smaller model through `layer`."""
        self.small = [self.small_chain.advance(layer, batch, states) for batch, states in enumerate(self.small)]


@torch.no_grad()
def repair(streams: Streams, layer: int, kept: dict[str, torch.Tensor], stages: list[list[str]]) -> None:
    """Changes the weights of `layer` in the smaller model. stages: names of linears, together what one tensor feeds."""
    small, anatomy = streams.small_chain.modules[layer], streams.anatomy
    for names in stages:
        last = names is stages[-1] and names[0] in anatomy.groups and anatomy.adds
        sums = {name: Correction() for name in names}
        for batch in range(len(streams.dense)):
            inputs, now, result = watched(streams.small_chain, layer, batch, streams.small[batch], names, whole=last)
            device = now[names[0]].device
            wanted = streams.cut(streams.wanted[batch]).to(device).float()
            weight = 1 / wanted.square().mean(-1).clamp_min(1e-12)  # what norms make of a token
            given = {} if last else watched(streams.chain, layer, batch, streams.dense[batch], names)[1]
            for name in names:
                if last:
                    error = wanted - result.float()
                elif name in anatomy.groups:
                    error = streams.cut(given[name]).float() - now[name].float()
                    if anatomy.adds:
                        before = streams.cut(streams.dense[batch]).float() - streams.small[batch].float()
                        error += before.to(device)
                else:
                    rows = cut_units(anatomy, f"{name}.bias", torch.arange(given[name].shape[-1]), kept)
                    error = given[name][..., rows.to(device)].float() - now[name].float()
                sums[name].update(inputs[name].flatten(0, -2), error.flatten(0, -2), weight.flatten())
        for name in names:
            own = weight_of(small.get_submodule(name))
            own.copy_(own.float() + sums[name].solve())


class _AllSeen(Exception):
    pass


def watched(chain: Chain, layer: int, batch: int, hidden: torch.Tensor, names: list[str], whole: bool = False):
    """Inputs and outputs of some linears of a block by name, and the hidden states that it gives if it is to run on after
    the last of them (`whole`)."""
    inputs, outputs, result = {}, {}, None

    def see(name):
        def hook(module, args, output):
            inputs[name], outputs[name] = args[0], output
            if len(outputs) == len(names) and not whole:
                raise _AllSeen

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(chain.modules[layer].get_submodule(name).register_forward_hook(see(name)).remove)
        try:
            result = first_tensor(chain.call(layer, batch, hidden))
        except _AllSeen:
            pass
    return inputs, outputs, result


def stages_of(streams: Streams) -> list[list[str]]:
    """The linears of a block in the order they are called, together what one tensor feeds."""
    names = streams.anatomy.linears
    inputs, _, _ = watched(streams.chain, 0, 0, streams.wanted[0], names)
    stages: dict[int, list[str]] = {}
    for name in inputs:  # hooks ran in this order, and all inputs are alive
        stages.setdefault(id(inputs[name]), []).append(name)
    return list(stages.values())
