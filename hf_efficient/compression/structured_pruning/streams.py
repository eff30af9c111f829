"""The residual streams of the dense and of the smaller model, followed side by side, layer by layer."""

import dataclasses

import torch

from hf_efficient.calibration.blocks import Chain, weight_of, without_cache
from hf_efficient.compression.structured_pruning.anatomy import Anatomy
from hf_efficient.compression.structured_pruning.cutting import Cutter
from hf_efficient.observers.hooks import watching_inputs
from hf_efficient.observers.linear_inputs import LinearInputs


class Streams:
    """Hidden states of both models on the calibration batches: lists of [B, T, H] on the CPU, one tensor a batch.

    Attributes:
        dense: of the dense model, into the current layer.
        wanted: of the dense model, into the next layer that stays: what the smaller model should give after the current
            one.
        small: of the smaller model.
        chain, small_chain: the blocks of both models, by their number in the dense one.

    Raises:
        ValueError: the smaller model's embedding is not the cut embedding of the dense one.
    """

    def __init__(self, anatomy: Anatomy, cutter: Cutter):
        self.anatomy, self.basis, self.chain = anatomy, cutter.basis, anatomy.chain
        self.wanted = anatomy.followed.record(self.chain)
        self.small = [self.cut(hidden) for hidden in self.wanted]
        blocks, forms = cutter.blocks, [self.chain.forms[layer] for layer in cutter.layers]
        batch = {name: value.to(cutter.small.device) for name, value in anatomy.batches[0].items()}
        own = Chain(self.chain.names[: len(blocks)], blocks, forms, [[] for _ in blocks])
        with without_cache(cutter.small):
            (first,) = own.record(lambda _: cutter.small(**batch), 1)
        if not torch.allclose(first.float(), self.small[0].float(), rtol=0.02, atol=0.02 * first.abs().max().item()):
            kind = type(cutter.small).__name__
            raise ValueError(f"{kind} scales its embedding by its hidden_size, which cannot become another one")
        modules = dict(zip(cutter.layers, blocks))
        self.small_chain = dataclasses.replace(self.chain, modules=modules, carried=[{} for _ in self.wanted])

    def cut(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is left of hidden states [..., H] of the dense model: [..., H'] of the smaller one."""
        return hidden if self.basis is None else self.basis.cut(hidden, -1)

    @torch.no_grad()
    def enter(self, layer: int, following: int) -> None:
        """Makes `layer` the current one, and runs the dense model from there into the layer `following`."""
        self.dense = self.wanted
        for index in range(layer, following):
            self.wanted = self.chain.advance_all(index, self.wanted)

    @torch.no_grad()
    def leave(self, layer: int) -> None:
        """Runs the smaller model through `layer`."""
        self.small = self.small_chain.advance_all(layer, self.small)

    @torch.no_grad()
    def hessian(self, layer: int, linear: str) -> torch.Tensor:
        """[K, K], the sum of x^T x over the inputs of a linear of `layer` of the dense model, before `enter(layer)`."""
        module = self.chain.modules[layer].get_submodule(linear)
        inputs = LinearInputs(weight_of(module).shape[1], name=linear, device=module.weight.device)
        with watching_inputs({linear: module}, lambda _, x: inputs.update(x)):
            for batch, states in enumerate(self.wanted):
                self.chain.call(layer, batch, states)
        return inputs.hessian
