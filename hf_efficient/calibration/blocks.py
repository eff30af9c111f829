"""A model as chains of blocks that can be run one at a time, with the arguments that its own forward gives them.

A chain is a list of modules (`nn.ModuleList`, `nn.Sequential`) that the model calls once each, in order, each on the
hidden states that the one before returned. What the model does around them (embeddings, masks, rotary tables, the step
from an encoder to a decoder) is never reimplemented. The model's own forward runs, with stand-ins in place of the
blocks: they record their arguments and pass the hidden states on."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.kernels.widened_products import widened_products
from hf_efficient.observers.hooks import frozen, replaced_forwards
from hf_efficient.observers.linear_inputs import LinearInputs


Keep = Callable[[int, torch.Tensor], torch.Tensor]  # (batch, hidden states) -> where they are kept


@dataclass(frozen=True)
class Produced:
    """In recorded arguments, stands for element `element` of the output of block `block`; (-1, 0) is the chain's
    input."""

    block: int
    element: int


class _LastBlockReached(Exception):
    """Ends the model's forward: nothing behind the last block is recorded."""


def _on_cpu(batch: int, states: torch.Tensor) -> torch.Tensor:
    return states.cpu()


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to its leaves: everything in it that is no list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        parts = [_map(part, fn) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is dict:
        return {key: _map(part, fn) for key, part in value.items()}
    return fn(value)


def leaves(value: Any) -> list:
    """The leaves of `value`: everything in it that is no list, tuple or dict."""
    found = []
    _map(value, found.append)
    return found


def hidden_argument(args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The hidden states among the arguments of a block: the first one, or `hidden_states`."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, torch.Tensor) else None


def first_tensor(output: Any) -> torch.Tensor:
    """The hidden states in the output of a module: a tensor, or the first one of a tuple or ModelOutput."""
    return output if isinstance(output, torch.Tensor) else next(t for t in outputs_of(output) if t is not None)


def outputs_of(output: Any) -> tuple:
    """The elements of the output of a block, the hidden states first."""
    return output if isinstance(output, tuple) else (output,) if isinstance(output, torch.Tensor) else output.to_tuple()


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a linear or a Conv1D, which keeps it transposed, as a view [N, K]."""
    return module.weight.data.t() if isinstance(module, Conv1D) else module.weight.data


@contextmanager
def without_cache(model: nn.Module):
    """Inside, every config of the model has `use_cache=False`: each run of a block would fill a cache."""
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    before = [(config, config.use_cache) for config in configs.values() if getattr(config, "use_cache", None)]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


@contextmanager
def calibrating(model: nn.Module, device):
    """Inside, the model is in evaluation mode, no parameter asks for a gradient (refinement tunes tensors of its own),
    and products of bfloat16 are fast where `device` is a CPU."""
    with frozen(model), widened_products(torch.device(device)):
        yield


class _ArgumentStore:
    """CPU copies of argument tensors; blocks and batches that get equal tensors share one copy."""

    def __init__(self):
        self._by_form: dict[tuple, list[torch.Tensor]] = {}
        self._by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def next_batch(self) -> None:
        self._by_id = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._by_id:
            copy, known = tensor.detach().cpu(), self._by_form.setdefault((tensor.shape, tensor.dtype), [])
            same = next((other for other in known if torch.equal(other, copy)), None)
            if same is None and len(known) < 4:  # more differ from batch to batch: not worth comparing
                known.append(copy)
            self._by_id[id(tensor)] = tensor, copy if same is None else same
        return self._by_id[id(tensor)][1]


@dataclass
class Chain:
    """Blocks in the order they are called, and what recording and running them has produced.

    Attributes:
        names, modules: full names of the blocks, and the blocks.
        forms: the output of each block: None for a tensor, for a tuple whether each element is there (not None).
        linears: for each block the full names of its modules to compress, in the order they are called.
        arguments: [batch][block] -> (args, kwargs), hidden states replaced by `Produced`.
        carried: [batch] -> outputs that later blocks ask for.
        outputs: [batch] -> hidden states after the last block, once it has run.
    """

    names: list[str]
    modules: list[nn.Module]
    forms: list[tuple[bool, ...] | None]
    linears: list[list[str]]
    arguments: list[list[tuple[tuple, dict]]] = field(default_factory=list)
    carried: list[dict[Produced, torch.Tensor]] = field(default_factory=list)
    outputs: list[torch.Tensor] | None = None

    def record(self, run: Callable[[int], Any], batches: int, keep: Keep | None = None) -> list[torch.Tensor]:
        """Calls `run(batch)`, the model's forward, for each batch and keeps the arguments that it gives to the blocks.
        Returns the hidden states into the first block, one tensor a batch: what `keep` makes of them."""
        keep = keep or _on_cpu
        kept, inputs, self.arguments, self.outputs = _ArgumentStore(), [], [], None
        for batch in range(batches):
            kept.next_batch()
            recorded: list[tuple[tuple, dict]] = []
            # by id; the object is kept alive so that its id stays its own
            produced: dict[int, tuple[Produced, Any]] = {}

            def stand_in(index, batch=batch, recorded=recorded, produced=produced):
                def forward(*args, **kwargs):
                    hidden = hidden_argument(args, kwargs)
                    if index != len(recorded) or (index and id(hidden) not in produced):
                        raise RuntimeError(
                            f"{self.names[index]} was not called after the block before it, on its output"
                        )
                    if index == 0:
                        inputs.append(keep(batch, hidden.detach()))
                        produced[id(hidden)] = Produced(-1, 0), hidden

                    def mark(value):
                        if id(value) in produced:
                            return produced[id(value)][0]
                        return kept.keep(value) if isinstance(value, torch.Tensor) else value

                    recorded.append(_map((args, kwargs), mark))
                    if index == len(self.modules) - 1:
                        raise _LastBlockReached
                    return self._stand_in_output(index, hidden, produced)

                return forward

            with replaced_forwards(self.modules, stand_in), torch.no_grad():
                try:
                    run(batch)
                except _LastBlockReached:
                    pass
                else:
                    raise RuntimeError(f"the model's forward did not reach {self.names[-1]}")
            self.arguments.append(recorded)
        self.carried = [{} for _ in range(batches)]
        return inputs

    def _stand_in_output(self, index: int, hidden: torch.Tensor, produced: dict) -> Any:
        form = self.forms[index]
        elements = [hidden.view_as(hidden) if there else None for there in (form or (True,))]  # a new object for each
        for element, value in enumerate(elements):
            if value is not None:
                produced[id(value)] = Produced(index, element), value
        return elements[0] if form is None else tuple(elements)

    @contextmanager
    def replayed(self, batch: int):
        """Inside, the model's forward takes the outputs of this chain instead of running its blocks."""

        def stand_in(index):
            def forward(*args, **kwargs):
                hidden = hidden_argument(args, kwargs)
                if index == len(self.modules) - 1:
                    hidden = self.outputs[batch].to(hidden.device)
                return self._stand_in_output(index, hidden, {})

            return forward

        with replaced_forwards(self.modules, stand_in):
            yield

    def call(self, index: int, batch: int, hidden: torch.Tensor) -> Any:
        """The output of block `index` for `hidden`, with the other arguments recorded for that batch."""
        module = self.modules[index]
        device = next((p.device for p in module.parameters() if not p.is_meta), hidden.device)

        def fill(value):
            if isinstance(value, Produced):
                is_hidden = value == Produced(index - 1, 0)
                value = hidden if is_hidden else self.carried[batch][value]
            return value.to(device) if isinstance(value, torch.Tensor) else value

        args, kwargs = _map(self.arguments[batch][index], fill)
        return module(*args, **kwargs)

    def advance(self, index: int, batch: int, hidden: torch.Tensor, keep: Keep | None = None) -> torch.Tensor:
        """The hidden states after block `index`, as `keep` returns them; keeps the outputs that later blocks read in
        `carried`."""
        output = self.call(index, batch, hidden)
        carried = self.carried[batch]
        if index == 0:
            carried[Produced(-1, 0)] = hidden
        for element, value in enumerate(outputs_of(output)):
            carried[Produced(index, element)] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        later = list(enumerate(self.arguments[batch]))[index + 1 :]
        marked = ((i, value) for i, call in later for value in leaves(call) if isinstance(value, Produced))
        wanted = {value for i, value in marked if value != Produced(i - 1, 0)}
        self.carried[batch] = {key: value for key, value in carried.items() if key in wanted}
        return (keep or _on_cpu)(batch, first_tensor(output).detach())

    def advance_all(self, index: int, hidden: list[torch.Tensor], keep: Keep | None = None) -> list[torch.Tensor]:
        """`advance` of every batch."""
        return [self.advance(index, batch, states, keep) for batch, states in enumerate(hidden)]

    def release(self) -> None:
        """Frees arguments and carried tensors; the outputs stay for the chains after this one."""
        self.arguments, self.carried = [], []


@dataclass
class Block:
    """The block that is being compressed: what transforms, methods and refinement work on.

    Attributes:
        name, module: full name of the block, and the block.
        linears: full name -> nn.Linear or Conv1D to compress, in the order they are called.
        experts: full name -> module of fused experts (see `hf_efficient.experts`) to compress.
        chain, index: the chain that the block is part of, and its number in it.
        inputs: [batch] -> hidden states [B, T, H] into the block, on the CPU; they come from compressed blocks.
        schemes, formats: name in `linears` or `experts` -> config and Format.
        statistics: name of a linear -> LinearInputs (linears that read one tensor share the object). Name of an expert
            weight (`...experts.down_proj`) -> `RoutedInputs`, one LinearInputs an expert.
        transforms: name of a linear -> the tensors of its `TransformedFormat`, where a transform set one.
        tensors: name of a linear or of an expert weight -> canonical tensors, once they are chosen.
        gradients: name of a linear -> its `LinearGradients`, where its method needs them.
    """

    name: str
    module: nn.Module
    linears: dict[str, nn.Module]
    experts: dict[str, nn.Module]
    chain: Chain
    index: int
    inputs: list[torch.Tensor]
    schemes: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, LinearInputs | Sequence[LinearInputs]] = field(default_factory=dict)
    transforms: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)

    def token_weights(self, batches: Sequence[int]) -> dict[str, Callable[[int], torch.Tensor]]:
        """Name of a linear -> a function of a position in `batches`, which returns the weights float32 [B, T] of its
        tokens; of those whose method weighs tokens."""

        def of(weights: Sequence[torch.Tensor]):
            return lambda position: weights[batches[position]]

        weighed = ((name, own.token_weights) for name, own in self.gradients.items())
        return {name: of(weights) for name, weights in weighed if weights is not None}

    def run(self, batch_index: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states [B, T, H] after the block, on its device. hidden: into the block; by default its inputs of
        that batch. The other arguments are those that the model gave. Records gradients where they are enabled."""
        hidden = self.inputs[batch_index] if hidden is None else hidden
        return first_tensor(self.chain.call(self.index, batch_index, hidden))
