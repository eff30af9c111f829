"""A model as chains of blocks that can be run one at a time, with the arguments that its own forward gives them.

A chain is a list of modules (`nn.ModuleList`, `nn.Sequential`) that the model calls once each, one after another, each on
the hidden states that the one before gave. What the model does around them (embeddings, masks, rotary tables, the step
from an encoder to a decoder) is never reimplemented: the model's own forward runs, with stand-ins in place of the blocks
that note their arguments and hand the hidden states on.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_efficient.observers.linear_inputs import LinearInputs


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Produced:
    """Stands in recorded arguments for what an earlier block of the chain gives: element `element` of its output."""

    block: int
    element: int


class _LastBlockReached(Exception):
    pass


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to everything in it that is no list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        parts = [_map(part, fn) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is dict:
        return {key: _map(part, fn) for key, part in value.items()}
    return fn(value)


def _leaves(value: Any) -> list:
    found = []
    _map(value, found.append)
    return found


def hidden_argument(args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The hidden states among the arguments of a block: the first argument, or the one of that name."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, torch.Tensor) else None


def first_tensor(output: Any) -> torch.Tensor:
    """The hidden states in what a module gives: a tensor, or the first of a tuple or of a ModelOutput."""
    return output if isinstance(output, torch.Tensor) else next(t for t in _outputs(output) if t is not None)


def _outputs(output: Any) -> tuple:
    """The elements of what a block gives, the hidden states first."""
    return (
        output if isinstance(output, tuple) else (output,) if isinstance(output, torch.Tensor) else output.to_tuple()
    )


@contextmanager
def replaced_forwards(modules: Iterable[nn.Module], make: Callable[[int], Callable]):
    """Gives the i-th module `make(i)` as its forward; attributes, hooks and the class stay."""
    own = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        for index, (module, _) in enumerate(own):
            module.forward = make(index)
        yield
    finally:
        for module, forward in own:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@contextmanager
def without_cache(model: nn.Module):
    """`use_cache=False` in every config of the model: a cache would be filled by each run of a block."""
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    before = [(config, config.use_cache) for config in configs.values() if getattr(config, "use_cache", None)]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


class _Kept:
    """CPU copies of argument tensors, one for all blocks and batches that get the same."""

    def __init__(self):
        self._by_form: dict[tuple, list[torch.Tensor]] = {}
        self._by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def next_batch(self) -> None:
        self._by_id = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._by_id:
            copy, known = tensor.detach().cpu(), self._by_form.setdefault((tensor.shape, tensor.dtype), [])
            same = next((other for other in known if torch.equal(other, copy)), None)
            if same is None and len(known) < 4:  # what differs from batch to batch is not searched for
                known.append(copy)
            self._by_id[id(tensor)] = tensor, copy if same is None else same
        return self._by_id[id(tensor)][1]


@dataclass
class Chain:
    """Blocks in the order they are called, and what recording and running them has left.

    names, modules: of the blocks.
    forms: for each block, which elements its output has: None for a tensor, else for each element of the tuple whether
        there is one.
    linears: full names of the modules of interest in each block, in the order they are called.
    """

    names: list[str]
    modules: list[nn.Module]
    forms: list[tuple[bool, ...] | None]
    linears: list[list[str]]
    arguments: list[list[tuple[tuple, dict]]] = field(default_factory=list)  # [batch][block], hidden states marked
    carried: list[dict[Produced, torch.Tensor]] = field(default_factory=list)  # [batch], what later blocks ask for
    outputs: list[torch.Tensor] | None = None  # hidden states after the last block, once it has been run

    def record(self, run: Callable[[int], Any], batches: int) -> list[torch.Tensor]:
        """Calls `run(batch)`, the model's forward, for each batch and keeps what it gives to the blocks.

        Returns:
            the hidden states into the first block, one tensor a batch, on the CPU.
        """
        kept, inputs, self.arguments, self.outputs = _Kept(), [], [], None
        for batch in range(batches):
            kept.next_batch()
            recorded: list[tuple[tuple, dict]] = []
            produced: dict[
                int, tuple[Produced, Any]
            ] = {}  # id -> (what it stands for, the object, which keeps its id)

            def stand_in(index, recorded=recorded, produced=produced):
                def forward(*args, **kwargs):
                    hidden = hidden_argument(args, kwargs)
                    if index != len(recorded) or (index and id(hidden) not in produced):
                        raise RuntimeError(
                            f"{self.names[index]} was not called after the block before it, on its output"
                        )
                    if index == 0:
                        inputs.append(hidden.detach().cpu())
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
        """The model's forward inside takes the outputs of this chain instead of running its blocks."""

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
        """What block `index` gives for `hidden`, with the other arguments recorded for that batch."""
        module = self.modules[index]
        device = next((p.device for p in module.parameters()), hidden.device)

        def fill(value):
            if isinstance(value, Produced):
                is_hidden = value == Produced(index - 1, 0)
                value = hidden if is_hidden else self.carried[batch][value]
            return value.to(device) if isinstance(value, torch.Tensor) else value

        args, kwargs = _map(self.arguments[batch][index], fill)
        return module(*args, **kwargs)

    def advance(self, index: int, batch: int, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states after block `index`, on the CPU; also keeps what later blocks take from this one."""
        output = self.call(index, batch, hidden)
        carried = self.carried[batch]
        if index == 0:
            carried[Produced(-1, 0)] = hidden
        for element, value in enumerate(_outputs(output)):
            carried[Produced(index, element)] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        later = list(enumerate(self.arguments[batch]))[index + 1 :]
        leaves = ((i, value) for i, call in later for value in _leaves(call) if isinstance(value, Produced))
        wanted = {value for i, value in leaves if value != Produced(i - 1, 0)}
        self.carried[batch] = {key: value for key, value in carried.items() if key in wanted}
        return first_tensor(output).detach().cpu()

    def release(self) -> None:
        """Forgets arguments and carried tensors; the outputs stay for the chains after this one."""
        self.arguments, self.carried = [], []


@dataclass
class Block:
    """One block at its turn: what transforms, methods and refinement work on.

    name: of the module in the model.
    linears: full name -> nn.Linear or Conv1D to be quantized, in the order they are called.
    experts: full name -> module of fused experts (see `hf_efficient.experts`) to be quantized.
    inputs: hidden states [B, T, H] into the block, one tensor a batch, on the CPU; they come from quantized blocks.
    schemes, formats: the names of `linears` and `experts` -> config and Format.
    statistics: name of a linear -> LinearInputs (linears that one tensor feeds share one object); name of an expert weight
        (`...experts.down_proj`) -> a list of them, one an expert.
    transforms: name of a linear -> the tensors of its `TransformedFormat`, where a transform has set one.
    tensors: the names of `formats` (of an expert weight those of `statistics`) -> canonical tensors, once quantized.
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
    statistics: dict[str, LinearInputs | list[LinearInputs]] = field(default_factory=dict)
    transforms: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def run(self, batch_index: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states [B, T, H] that the block gives, on its device, for `hidden` or else for its inputs of that
        batch; the other arguments are those the model gave. Records gradients where they are enabled."""
        hidden = self.inputs[batch_index] if hidden is None else hidden
        return first_tensor(self.chain.call(self.index, batch_index, hidden))


def find_chains(model: nn.Module, targets: Iterable[str], run: Callable[[], Any]) -> tuple[list[Chain], list[str]]:
    """The chains of `model` that hold modules named in `targets`, found by watching one forward pass.

    Args:
        run: calls the model's forward on a small example.

    Returns:
        the chains in the order they are called, and the targets in none of them, also in that order; a target that the
        forward pass did not call is not among them unless it lies in a block.
    """
    targets = set(targets)
    lists = {
        name: {f"{name}.{key}": block for key, block in module.named_children()}
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and any(t.startswith(name + ".") for t in targets)
    }
    calls = _watch(model, targets.union(*lists.values()), run)
    chains, inside = [], ()
    for name in sorted(lists, key=lambda name: name.count(".")):
        if name.startswith(inside):
            continue
        called = [call for call in calls if call.name in lists[name]]
        if called and _follow_each_other(called) and not targets.intersection(lists[name]):
            blocks = {call.name: lists[name][call.name] for call in called}
            order = {call.name: None for call in calls if call.name in targets}  # a set that keeps its order
            order.update(dict.fromkeys(sorted(targets - set(order))))
            linears = [[target for target in order if target.startswith(block + ".")] for block in blocks]
            chain = Chain(list(blocks), list(blocks.values()), [call.form for call in called], linears)
            if _gives_the_same(chain, called, run):
                chains.append((calls.index(called[0]), chain))
                inside += (name + ".",)
    chains = [chain for _, chain in sorted(chains, key=lambda pair: pair[0])]
    held = {target for chain in chains for names in chain.linears for target in names}
    return chains, list(dict.fromkeys(call.name for call in calls if call.name in targets - held))


@dataclass
class _Call:
    name: str
    hidden: torch.Tensor | None
    output: Any = None

    @property
    def form(self) -> tuple[bool, ...] | None:
        return None if isinstance(self.output, torch.Tensor) else tuple(v is not None for v in _outputs(self.output))


def _watch(model: nn.Module, names: set[str], run: Callable[[], Any]) -> list[_Call]:
    """Every call of the modules `names`, in order."""
    calls, open_calls = [], {name: [] for name in names}
    with ExitStack() as stack, torch.no_grad():
        for name in names:
            module = model.get_submodule(name)

            def before(module, args, kwargs, name=name):
                calls.append(_Call(name, hidden_argument(args, kwargs)))
                open_calls[name].append(calls[-1])

            def after(module, args, output, name=name):
                open_calls[name].pop().output = output

            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ):
                stack.callback(handle.remove)
        run()
    return calls


def _follow_each_other(calls: list[_Call]) -> bool:
    if len({call.name for call in calls}) < len(calls) or calls[0].hidden is None:
        return False
    if not all(isinstance(call.output, (torch.Tensor, tuple)) for call in calls):
        return False
    return all(after.hidden is first_tensor(before.output) for before, after in zip(calls, calls[1:]))


def _gives_the_same(chain: Chain, calls: list[_Call], run: Callable[[], Any]) -> bool:
    """Whether the blocks, one by one, give what they gave in the model's own forward."""
    try:
        (hidden,) = chain.record(lambda _: run(), 1)
        with torch.no_grad():
            for index, call in enumerate(calls):
                hidden = chain.advance(index, 0, hidden)
                expected = first_tensor(call.output).cpu()
                if not torch.allclose(hidden, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()):
                    raise RuntimeError(f"{call.name} gives other hidden states when it is run by itself")
        chain.outputs, expected = [hidden], first_tensor(run())
        with chain.replayed(0):
            given = first_tensor(run())
        if not torch.allclose(given, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item()):
            raise RuntimeError("the model reads what blocks before the last one give")
    except Exception as error:
        logger.warning(
            "%s cannot be calibrated block by block (%s): its layers are calibrated by passes of the whole model",
            chain.names[0].rpartition(".")[0],
            error,
        )
        return False
    finally:
        chain.outputs = None
        chain.release()
    return True


class BlockwiseModel:
    """A model, and the batches (dicts of arguments of its forward) that it is followed on.

    Attributes:
        chains: in the order to work through them; a chain counts as done once its `outputs` are set.
        outside: names of the targets in no chain, in the order they are called.
    """

    def __init__(self, model: nn.Module, batches: list[dict[str, torch.Tensor]], targets: Iterable[str]):
        self.model, self.batches, self.chains = model, batches, []
        example = batches[0]
        if set(example) <= {"input_ids", "decoder_input_ids", "attention_mask"}:  # text can be cut anywhere
            example = {name: value[:1, :16] for name, value in example.items()}
        self.chains, self.outside = find_chains(model, targets, lambda: self._call(example))

    def _call(self, arguments: dict[str, torch.Tensor]) -> Any:
        device = self.model.device
        with without_cache(self.model), torch.no_grad():
            return self.model(**{name: value.to(device) for name, value in arguments.items()})

    def forward(self, batch: int) -> Any:
        """What the model gives for a batch; the chains that are done hand out their outputs instead of running."""
        with ExitStack() as stack:
            for chain in self.chains:
                if chain.outputs is not None:
                    stack.enter_context(chain.replayed(batch))
            return self._call(self.batches[batch])

    def record(self, chain: Chain) -> list[torch.Tensor]:
        """The hidden states into the first block of `chain`, one tensor [B, T, H] a batch, on the CPU; the chain keeps
        the other arguments of all its blocks."""
        return chain.record(self.forward, len(self.batches))
