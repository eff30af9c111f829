"""Finds the chains of blocks of a model by watching its own forward, and runs the model along them."""

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_efficient.calibration.blocks import Chain, Keep, first_tensor, hidden_argument, outputs_of, without_cache
from hf_efficient.observers.hooks import watching_outputs


logger = logging.getLogger(__name__)


def find_chains(model: nn.Module, targets: Iterable[str], run: Callable[[], Any]) -> tuple[list[Chain], list[str]]:
    """The chains of `model` that hold modules named in `targets`, found by watching one forward pass, which `run` calls
    on a small example.

    Returns (the chains in the order they are called, the targets outside of them in that order). A target that the
    forward did not call is in neither, unless it lies in a block.
    """
    targets = set(targets)
    lists = {
        name: {f"{name}.{key}": block for key, block in module.named_children()}
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and any(t.startswith(name + ".") for t in targets)
    }
    listed = set().union(*lists.values())
    calls = _watch(model, targets | listed, listed, run)
    chains, inside = [], ()
    for name in sorted(lists, key=lambda name: name.count(".")):
        if name.startswith(inside):
            continue
        called = [call for call in calls if call.name in lists[name]]
        if called and _follow_each_other(called) and not targets.intersection(lists[name]):
            blocks = {call.name: lists[name][call.name] for call in called}
            order = {call.name: None for call in calls if call.name in targets}  # an ordered set
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
class _BlockCall:
    """One call of a module during the forward that is watched."""

    name: str
    hidden: torch.Tensor | None
    output: Any = None

    @property
    def form(self) -> tuple[bool, ...] | None:
        return None if isinstance(self.output, torch.Tensor) else tuple(v is not None for v in outputs_of(self.output))


def _watch(model: nn.Module, names: set[str], blocks: set[str], run: Callable[[], Any]) -> list[_BlockCall]:
    """Every call of the modules `names`, in order; of those in `blocks` with its hidden states and output: those
    of all linears together would be much of a large model's memory."""
    calls, open_calls = [], {name: [] for name in names}
    modules = {name: model.get_submodule(name) for name in names}

    def before(module, args, kwargs, name):
        calls.append(_BlockCall(name, hidden_argument(args, kwargs) if name in blocks else None))
        open_calls[name].append(calls[-1])

    def after(name, args, kwargs, output):
        call = open_calls[name].pop()
        if name in blocks:
            call.output = output

    with ExitStack() as stack, torch.no_grad(), watching_outputs(modules, after):
        for name, module in modules.items():
            hook = module.register_forward_pre_hook(functools.partial(before, name=name), with_kwargs=True)
            stack.callback(hook.remove)
        run()
    return calls


def _follow_each_other(calls: list[_BlockCall]) -> bool:
    if len({call.name for call in calls}) < len(calls) or calls[0].hidden is None:
        return False
    if not all(isinstance(call.output, (torch.Tensor, tuple)) for call in calls):
        return False
    return all(after.hidden is first_tensor(before.output) for before, after in zip(calls, calls[1:]))


def _gives_the_same(chain: Chain, calls: list[_BlockCall], run: Callable[[], Any]) -> bool:
    """Whether the blocks, run one by one, compute what they compute in the model's own forward."""
    try:
        (hidden,) = chain.record(lambda _: run(), 1)
        with torch.no_grad():
            for index, call in enumerate(calls):
                hidden = chain.advance(index, 0, hidden)
                if not _close(hidden, first_tensor(call.output).cpu()):
                    raise RuntimeError(f"{call.name} gives other hidden states when it is run by itself")
        chain.outputs, expected = [hidden], first_tensor(run())
        with chain.replayed(0):
            given = first_tensor(run())
        if not _close(given, expected):
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


def _close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(given, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


class BlockwiseModel:
    """A model that is run block by block.

    Args:
        batches: arguments of the model's forward, one dict a batch.
        targets: full names of the modules to compress.

    Attributes:
        chains: in the order to work through them. A chain is done once its `outputs` are set.
        outside: names of the targets in no chain, in the order they are called.
    """

    def __init__(self, model: nn.Module, batches: list[dict[str, torch.Tensor]], targets: Iterable[str]):
        self.model, self.batches, self.chains = model, batches, []
        example = batches[0]
        # a short piece of text shows the same calls
        if set(example) <= {"input_ids", "decoder_input_ids", "attention_mask"}:
            example = {name: value[:1, :16] for name, value in example.items()}
        self.chains, self.outside = find_chains(model, targets, lambda: self._call(example))

    def _call(self, arguments: dict[str, torch.Tensor]) -> Any:
        device = self.model.device
        with without_cache(self.model), torch.no_grad():
            return self.model(**{name: value.to(device) for name, value in arguments.items()})

    def forward(self, batch: int) -> Any:
        """The output of the model for a batch; chains that are done return their `outputs` instead of running."""
        with ExitStack() as stack:
            for chain in self.chains:
                if chain.outputs is not None:
                    stack.enter_context(chain.replayed(batch))
            return self._call(self.batches[batch])

    def record(self, chain: Chain, keep: Keep | None = None) -> list[torch.Tensor]:
        """The hidden states into the first block of `chain`, one tensor [B, T, H] a batch, as `keep` returns them; the
        chain keeps the other arguments of all its blocks."""
        return chain.record(self.forward, len(self.batches), keep)
