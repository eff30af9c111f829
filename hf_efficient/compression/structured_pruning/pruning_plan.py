"""What pruning keeps of a model: its shape, layers, basis of the residual stream, and the units of every block."""

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of, without_cache
from hf_efficient.compression.structured_pruning.anatomy import Anatomy
from hf_efficient.compression.structured_pruning.residual_stream import observe_stream
from hf_efficient.compression.structured_pruning.shape_search import ShapeSearch, units_of
from hf_efficient.pruning.structured import l1, llm_pruner, shape
from hf_efficient.pruning.structured.groups import Groups, best_units


class PruningPlan:
    """What `prune_structure` keeps. All attributes are chosen at once; `kept` chooses the units block by block.

    Args:
        method, remove, shape: see `prune_structure`.

    Attributes:
        shape: `Shape` of the smaller model.
        config: config of the smaller model.
        layers: indices of the layers that stay, ascending.
        basis: `Basis` of the residual stream; None where the hidden size stays.
        axes: key of a parameter -> its axes along the residual stream (see `Anatomy.hidden_axes`); {} where it stays.

    Raises:
        ValueError: a shape that the model cannot have.
    """

    def __init__(self, anatomy: Anatomy, method: str, remove: float | None, shape: dict[str, int] | None):
        self.anatomy, self.method = anatomy, method
        model, old = anatomy.model, anatomy.shape
        if method == "slicegpt" and any(isinstance(module, nn.LayerNorm) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} has LayerNorms: a rotation of the hidden size passes RMSNorms only, and with "
                "these it would be a model of another class"
            )
        self.axes = anatomy.hidden_axes() if method == "slicegpt" or "hidden_size" in (shape or {}) else {}
        search = ShapeSearch(anatomy, method, self.axes)
        self._products = self._channel_products() if method == "llm_pruner" else {}
        self.shape = search.without(remove, self._loss) if shape is None else old.smaller(**shape)
        search.check(self.shape)
        self.layers, self.basis = list(range(old.num_hidden_layers)), None
        if self.axes or self.shape.num_hidden_layers < old.num_hidden_layers:
            self.layers, self.basis = observe_stream(anatomy, method, self.shape, self.axes)
        self.config = search.config(self.shape, self.layers)

    def kept(self, layer: int, streams) -> dict[str, torch.Tensor]:
        """Reader -> which of its units stay, bool [G, R], for the readers of `layer` that lose some.

        streams: `Streams` whose hidden states enter `layer`; read by method "shape" only."""
        block, found = self.anatomy.chain.modules[layer], {}
        for reader, groups in self.anatomy.groups.items():
            keep = units_of(groups, self.shape)
            if keep == tuple(groups.columns.shape[:2]):
                continue
            if self.method == "shape":
                weight = weight_of(block.get_submodule(reader))
                found[reader] = shape.kept_units(groups, keep, weight, streams.hessian(layer, reader))
            else:
                found[reader] = best_units(*self._scores(layer, groups), keep)
        return found

    def _scores(self, layer: int, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [G] of the groups and [G, R] of their units; the least go first."""
        if self.method == "llm_pruner":
            products = self._products[f"{self.anatomy.chain.names[layer]}.{groups.reader}"]
            whole = llm_pruner.unit_scores(groups.columns.flatten(1)[:, None], products)[:, 0]
            return whole, llm_pruner.unit_scores(groups.columns, products)
        block = self.anatomy.chain.modules[layer]
        units = l1.unit_scores(groups, {name: weight_of(block.get_submodule(name)) for name in self.anatomy.linears})
        return units.sum(1), units

    def _loss(self, new) -> float:
        """The sum of the scores of all groups that go where the shape becomes `new`."""
        total = 0.0
        for layer in range(self.anatomy.shape.num_hidden_layers):
            for groups in self.anatomy.groups.values():
                scores = self._scores(layer, groups)[0]
                total += scores.topk(len(scores) - units_of(groups, new)[0], largest=False).values.sum().item()
        return total

    def _channel_products(self) -> dict[str, torch.Tensor]:
        if "input_ids" not in self.anatomy.batches[0]:
            raise ValueError("method='llm_pruner' predicts tokens: calibration inputs need input_ids")
        readers = {
            f"{block}.{reader}": module.get_submodule(reader)
            for block, module in zip(self.anatomy.chain.names, self.anatomy.chain.modules)
            for reader in self.anatomy.groups
        }
        with without_cache(self.anatomy.model):
            return llm_pruner.channel_products(self.anatomy.model, readers, self.anatomy.batches_on_device())
