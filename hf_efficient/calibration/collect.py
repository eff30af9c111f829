"""Statistics of the inputs of the linear layers of a block, collected by hooks while the block runs."""

import functools
import logging
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from hf_efficient.calibration.routed_inputs import RoutedInputs, watching_routes
from hf_efficient.observers.hooks import watching_inputs
from hf_efficient.observers.linear_inputs import LinearInputs


logger = logging.getLogger(__name__)


class _LastLinearReached(Exception):
    """Ends a batch early: nothing behind its last linear is observed."""


@torch.no_grad()
def collect(
    run: Callable[[int], object],
    batches: int,
    linears: dict[str, nn.Module],
    experts: dict[str, nn.Module] | None = None,
    hessian: bool = True,
    keep: Callable[[str, int, torch.Tensor], torch.Tensor] | None = None,
    weights: Mapping[str, Callable[[int], torch.Tensor]] | None = None,
) -> dict[str, LinearInputs | RoutedInputs]:
    """Calls `run(batch)` for every batch and observes the inputs of modules.

    Args:
        run: computes what the modules are part of.
        linears: full name -> linear. Linears that read the very same tensor object share one `LinearInputs`.
        experts: full name -> fused experts. Each of their two weights gets `RoutedInputs`: of the rows routed to an
            expert for the first weight, of what it computed from them for the second.
        hessian: whether to accumulate hessians.
        keep: called with (name of experts, number of the batch, their hidden states [R, H]) -> the tensor to keep.
        weights: name of a linear -> a function of the batch, which returns weights float32 [B, T] of its rows in the
            hessian. Such linears share no statistics.

    Returns:
        full name -> statistics, in the order of the first calls. An expert that no row reached gets those of all other
        experts of its layer, and a warning names it.

    Raises:
        ValueError: NaN or infinity in an input, or a linear that was not reached and is no expert; names the layer.
    """
    observer, experts = _Observer(linears, hessian, weights or {}), experts or {}
    statistics: dict[str, LinearInputs | RoutedInputs] = observer.statistics
    routed: list[RoutedInputs] = []
    with ExitStack() as stack:
        stack.enter_context(watching_inputs(linears, observer.see))
        for name, module in experts.items():
            rows = stack.enter_context(watching_routes(module, keep and functools.partial(keep, name)))
            routed += rows.inputs(name, hessian)
        for batch in range(batches):
            observer.begin(batch, stop_at_last=batch > 0 and not experts)
            try:
                run(batch)
            except _LastLinearReached:
                pass
    _fill_unreached_linears([name for name in linears if name not in statistics], statistics)
    for inputs in routed:
        logger.info("%s: calibration tokens of each expert: %s", inputs.name, inputs.rows.counts.tolist())
        _warn([f"{inputs.name}[{expert}]" for expert in inputs.unreached])
    return statistics | {inputs.name: inputs for inputs in routed}


class _Observer:
    """What the hooks of linears share: which linears read one tensor, and which linear is called last."""

    def __init__(self, linears: dict[str, nn.Module], hessian: bool, weights: Mapping[str, Callable]):
        self.linears, self.hessian, self.weights = linears, hessian, weights
        self.statistics: dict[str, LinearInputs] = {}
        self._leader: dict[str, str] = {}  # name -> the linear whose hook counts the rows
        self._inputs: dict[str, weakref.ref] = {}  # leader -> its input in this batch
        self._called: set[str] = set()
        self._called_again = False
        self._stop_at: str | None = None
        self._last: str | None = None  # the linear called last, once a first batch has called every one
        self._is_first = True

    def begin(self, batch: int, stop_at_last: bool) -> None:
        self._batch = batch
        if stop_at_last and self._is_first:  # only the first batch tells the order, and only if it called every linear
            self._is_first = False
            if len(self._called) == len(self.linears):
                self._last = next(reversed(self.statistics), None)
        self._inputs.clear()
        self._called.clear()
        self._stop_at = self._last if stop_at_last and not self._called_again else None

    def see(self, name: str, x: torch.Tensor) -> None:
        self._called_again |= name in self._called
        self._called.add(name)
        leader = self._leader.get(name)
        if leader is None:
            alike = (other for other, tensor in self._inputs.items() if tensor() is x and other not in self.weights)
            leader = name if name in self.weights else next(alike, name)
            self._leader[name] = leader
            if leader == name:
                self.statistics[name] = LinearInputs(x.shape[-1], self.hessian, name, x.device)
            else:
                self.statistics[name] = self.statistics[leader]
        if leader == name:
            self._inputs[name] = weakref.ref(x)
            weights = self.weights.get(name)
            self.statistics[name].update(x, weights and weights(self._batch))
        elif self._inputs.get(leader, lambda: None)() is not x:
            raise RuntimeError(f"{name} and {leader} were fed by one tensor at first, and by two later")
        if name == self._stop_at:
            raise _LastLinearReached


def _fill_unreached_linears(unreached: list[str], statistics: dict) -> None:
    """Gives linears of experts (modules of their own, whose names differ only in one number) those of their
    siblings."""
    merged: dict[tuple, LinearInputs] = {}
    reached = dict(statistics)
    for name in unreached:
        alike = re.compile(r"\.".join(r"(\d+)" if part.isdigit() else re.escape(part) for part in name.split(".")))
        numbers = alike.fullmatch(name).groups()
        siblings = {
            id(inputs): inputs
            for other, inputs in reached.items()
            if (match := alike.fullmatch(other)) and sum(a != b for a, b in zip(numbers, match.groups())) == 1
        }
        if not siblings:
            raise ValueError(
                f"the calibration data never reaches {name}: exclude it with modules_to_not_convert, or give it a "
                "method that needs no data in overrides"
            )
        key = (numbers, *siblings)  # linears that share an input in the siblings share one here too
        if key not in merged:
            merged[key] = _merged(name, list(siblings.values()))
        statistics[name] = merged[key]
    _warn(unreached)


def _merged(name: str, statistics: list[LinearInputs]) -> LinearInputs:
    first = statistics[0]
    together = LinearInputs(first.in_features, first.hessian is not None, name, first.absmax.device)
    for inputs in statistics:
        together.merge(inputs)
    return together


def _warn(names: list[str]) -> None:
    if names:
        logger.warning(
            "no calibration token reached %s: quantized with the inputs of the other experts of the layer",
            ", ".join(names),
        )
