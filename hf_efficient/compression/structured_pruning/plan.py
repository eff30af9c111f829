"""What stays: the shape, the layers, the basis of the residual stream, and the units of every block."""

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import nn

from hf_efficient.calibration.blocks import first_tensor, hidden_argument, weight_of, without_cache
from hf_efficient.compression.structured_pruning.anatomy import LINEAR, Anatomy, input_axis
from hf_efficient.compression.structured_pruning.cutting import check_shapes
from hf_efficient.observers.linear_inputs import LinearInputs
from hf_efficient.pruning.structured import l1, llm_pruner, shape, slicegpt
from hf_efficient.pruning.structured.basis import Basis, Moments
from hf_efficient.pruning.structured.groups import Groups, best_units
from hf_efficient.pruning.structured.shapes import Shape, empty_model, largest_size, read_parameters, smaller_config


class Plan:
    """Chosen at once: `shape`, `config` (of the smaller model), `layers` (that stay) and `basis` (None where the residual stream
    stays as it is); block by block: `kept`.

    Args:
        remove, sizes: as `remove` and `shape` of `prune_structure`.

    Raises:
        ValueError: a shape that the model cannot have.
    """

    def __init__(self, anatomy: Anatomy, method: str, remove: float | None, sizes: dict[str, int] | None):
        self.anatomy, self.method, self.model, self.old = anatomy, method, anatomy.model, anatomy.shape
        if method == "slicegpt" and any(isinstance(module, nn.LayerNorm) for module in self.model.modules()):
            raise ValueError(
                f"{type(self.model).__name__} has LayerNorms: a rotation of the hidden size passes RMSNorms only, and with "
                "these it would be a model of another class"
            )
        self.axes = anatomy.hidden_axes() if method == "slicegpt" or "hidden_size" in (sizes or {}) else {}
        if sizes is not None:
            self._check(self.old.smaller(**sizes))
        self.products = self._products() if method == "llm_pruner" else {}
        self.shape = self.old.smaller(**sizes) if sizes is not None else self._shape_without(remove)
        self._check(self.shape)
        self.layers = list(range(self.old.num_hidden_layers))
        self.basis = None
        if self.axes or self.shape.num_hidden_layers < self.old.num_hidden_layers:
            self._look()
        self.config = self._config(self.shape, self.layers)

    def kept(self, layer: int, streams) -> dict[str, torch.Tensor]:
        """reader -> bool [G, R] of the units that stay, where not all do. streams: which "shape" looks at, into the layer."""
        block, found = self.anatomy.chain.modules[layer], {}
        for reader, groups in self.anatomy.groups.items():
            keep = self._keep(groups, self.shape)
            if keep == tuple(groups.columns.shape[:2]):
                continue
            if self.method == "shape":
                hessian = self._hessian(layer, reader, streams)
                found[reader] = shape.kept_units(groups, keep, weight_of(block.get_submodule(reader)), hessian)
            else:
                found[reader] = best_units(*self._scores(layer, groups), keep)
        return found

    @torch.no_grad()
    def _hessian(self, layer: int, reader: str, streams) -> torch.Tensor:
        module = self.anatomy.chain.modules[layer].get_submodule(reader)
        inputs = LinearInputs(weight_of(module).shape[1], name=reader, device=module.weight.device)
        hook = module.register_forward_pre_hook(lambda m, args: inputs.update(args[0]))
        try:
            for batch, states in enumerate(streams.wanted):
                streams.chain.call(layer, batch, states)
        finally:
            hook.remove()
        return inputs.hessian

    def _scores(self, layer: int, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        """[G] of the groups and [G, R] of their units."""
        if self.method == "llm_pruner":
            products = self.products[f"{self.anatomy.chain.names[layer]}.{groups.reader}"]
            whole = llm_pruner.unit_scores(groups.columns.flatten(1)[:, None], products)[:, 0]
            return whole, llm_pruner.unit_scores(groups.columns, products)
        block = self.anatomy.chain.modules[layer]
        units = l1.unit_scores(groups, {name: weight_of(block.get_submodule(name)) for name in self.anatomy.linears})
        return units.sum(1), units

    def _keep(self, groups: Groups, shape: Shape) -> tuple[int, int]:
        if groups.is_heads:
            return shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
        return shape.intermediate_size, 1

    def _config(self, new: Shape, layers: list[int] | None = None):
        head = self.model.get_output_embeddings()
        tied = head.weight is self.model.get_input_embeddings().weight
        layers = list(range(new.num_hidden_layers)) if layers is None else layers
        untie = tied and self.method == "slicegpt"
        return smaller_config(self.model.config, self.old, new, layers, self.anatomy.head_dim, untie)

    def _check(self, new: Shape) -> None:
        small = empty_model(type(self.model), self._config(new))
        kept = {reader: groups.first(*self._keep(groups, new)) for reader, groups in self.anatomy.groups.items()}
        check_shapes(self.anatomy, small, kept, self.axes, new.hidden_size)

    def _count(self, new: Shape) -> int | None:
        try:
            return read_parameters(empty_model(type(self.model), self._config(new)))
        except ValueError:
            return None

    def _shape_without(self, remove: float) -> Shape:
        if not remove:
            return self.old
        total = self._count(self.old)
        budget, name = (1 - remove) * total, "hidden_size" if self.method == "slicegpt" else "intermediate_size"
        found = []
        for heads in range(self.old.num_key_value_heads, 0, -1) if self.method == "llm_pruner" else [None]:
            try:
                base = self.old if heads is None else self.old.smaller(num_key_value_heads=heads)
                self._check(base)
            except ValueError:
                break  # the class has no such heads
            count = self._count_of(base, name)
            size = getattr(self.old, name)
            size = size if count(size) <= budget else largest_size(count, size, budget)
            if size is not None:
                found.append(base.smaller(**{name: size}))
        if not found:
            raise ValueError(
                f"remove={remove!r} is more than method={self.method!r} can take from {type(self.model).__name__}"
            )
        return min(found, key=self._loss) if len(found) > 1 else found[0]

    def _count_of(self, base: Shape, name: str):
        if name == "hidden_size":
            return lambda size: self._count(base.smaller(hidden_size=size))
        one, two = (self._count(base.smaller(intermediate_size=size)) for size in (1, 2))  # every neuron takes as many
        return lambda size: one + (size - 1) * (two - one)

    def _loss(self, new: Shape) -> float:
        """What all scores together say that the loss changes by."""
        total = 0.0
        for layer in range(self.old.num_hidden_layers):
            for groups in self.anatomy.groups.values():
                scores = self._scores(layer, groups)[0]
                total += scores.topk(len(scores) - self._keep(groups, new)[0], largest=False).values.sum().item()
        return total

    def _products(self) -> dict[str, torch.Tensor]:
        readers = {
            f"{block}.{reader}": module.get_submodule(reader)
            for block, module in zip(self.anatomy.chain.names, self.anatomy.chain.modules)
            for reader in self.anatomy.groups
        }

        def loss(output, batch):
            logits, ids = output.logits[:, :-1], batch["input_ids"][:, 1:]
            return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten().to(logits.device)) * len(ids)

        if "input_ids" not in self.anatomy.batches[0]:
            raise ValueError("method='llm_pruner' predicts tokens: calibration inputs need input_ids")
        with without_cache(self.model):
            return llm_pruner.channel_products(self.model, readers, self._batches(), loss)

    def _batches(self) -> list[dict[str, torch.Tensor]]:
        device = self.model.device
        return [{name: value.to(device) for name, value in batch.items()} for batch in self.anatomy.batches]

    @torch.no_grad()
    def _look(self) -> None:
        """One pass over the text, for `layers` and `basis`."""
        keys = {key.rpartition(".")[0] for key in self.axes}
        cut = {module for name, module in self.model.named_modules() if self.anatomy.key(name) in keys}
        linears = {
            module
            for name, module in self.model.named_modules()
            if module in cut
            and isinstance(module, LINEAR)
            and input_axis(module) in self.axes.get(self.anatomy.key(f"{name}.weight"), ())
        }
        moments = Moments(self.old.hidden_size, self.method == "slicegpt", self.model.device)
        inputs = {m: LinearInputs(self.old.hidden_size, hessian=False, device=self.model.device) for m in linears}
        turns = torch.zeros(self.old.num_hidden_layers)
        with ExitStack() as stack, without_cache(self.model):
            for module in cut:
                if not isinstance(module, (*LINEAR, nn.Embedding)):
                    stack.callback(module.register_forward_pre_hook(lambda m, args: moments.update(args[0])).remove)
                elif module in inputs and self.method == "shape":
                    hook = module.register_forward_pre_hook(lambda m, args: inputs[m].update(args[0]))
                    stack.callback(hook.remove)
            for layer, module in enumerate(self.anatomy.chain.modules):

                def see(module, args, kwargs, output, layer=layer):
                    turns[layer] += shape.turn(hidden_argument(args, kwargs), first_tensor(output)).cpu()

                stack.callback(module.register_forward_hook(see, with_kwargs=True).remove)
            for batch in self._batches():
                self.model(**batch)
        self.layers = shape.kept_layers(turns.tolist(), self.shape.num_hidden_layers)
        if self.method == "slicegpt":
            self.basis = slicegpt.basis(moments, self.shape.hidden_size)
        elif self.axes:
            weights = {m: weight_of(m).float().square().sum(0) for m in linears}
            importance = sum(seen.mean_square * weights[m] for m, seen in inputs.items())
            self.basis = Basis.selecting(moments.mean_square, importance, self.shape.hidden_size)
