"""Forwards of few tokens on a CPU, recorded once for every number of rows and of columns and then replayed."""

import functools
from collections.abc import Callable
from time import perf_counter

import torch
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils import logging, output_capturing

from hf_efficient.cache.bookkeeping.forward_plan import tree_mask as tree_bits
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable, interpreter


logger = logging.get_logger(__name__)

EAGER_FORWARDS = 2  # forwards of a model that run as they are: recording costs about three of them
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FEWEST = 4
MOST_TOKENS = 128  # of all rows: beyond, a forward takes so long that what is saved does not show
MOST_KEPT = 256 << 20  # bytes of the results of all recordings: 0.2 MB a token of SmolLM2


class CapturedForward:
    """`forward(tokens, positions)`, a forward of a model over `cache`, whose pool has a fixed size.

    A forward that cannot be recorded (it reads tensors on the host, such as the routing of some experts) runs as it is from
    then on.
    """

    settled = True  # whether forwards like the last one will take as long from now on

    def __init__(self, forward: Callable, cache: PagedCache):
        self.forward, self.cache = forward, cache
        self.holds: Callable[[], bool] | None = (
            None  # asked before every forward, when the caller's own code runs between them
        )
        self._tapes: dict[tuple[int, int], tuple] = {}  # the latest used last
        self._seen = 0
        self._works = True
        self._seconds_a_recording = 0.0  # the latest

    def capture_seconds(self, rows: int, columns: int) -> float:
        """What recording the next forward of so many takes, as far as is known; 0.0 where it runs as it is or is recorded."""
        kind = rows, padded(rows, columns)
        return 0.0 if self._runs_as_it_is(*kind) or kind in self._tapes else self._seconds_a_recording

    def _runs_as_it_is(self, rows: int, width: int) -> bool:
        return not self._works or width > WIDTHS[-1] or rows * width > MOST_TOKENS

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, tree_mask: torch.Tensor | None) -> tuple | None:
        """Appends `tokens` int64 [rows, columns] to the cache, and filler behind them up to one of `WIDTHS`, at `positions`
        int64 of the shape that the model takes; tree_mask as in `PagedCache.decode_step`. Returns what `forward` returned, in
        tensors that the next call overwrites; None when the forward has to run as it is."""
        rows, columns = tokens.shape
        width = padded(rows, columns)
        self.settled = self._runs_as_it_is(rows, width)
        if self.settled:
            return None
        if self.holds is not None and not self.holds():
            self._works = False
            return None
        self._seen += 1
        if self._seen <= EAGER_FORWARDS:
            return None
        if tree_mask is None and columns > 1 and self.cache.takes_trees:  # one continuation is a tree too: fewer kinds
            order = torch.arange(columns)
            tree_mask = tree_bits((order <= order[:, None]).expand(rows, -1, -1))
        new = (tokens, positions) if tree_mask is None else (tokens, positions, tree_mask)
        new = [torch.cat([x, x[..., -1:].expand(*x.shape[:-1], width - columns)], -1) for x in new]
        inputs, places, tape = self._tapes.pop((rows, width), (None, None, None))
        if inputs is None:
            inputs = tuple(tensor.clone() for tensor in new)
        for static, values in zip(inputs, new):
            static.copy_(values)
        try:
            with self.cache.decode_step(width, *inputs[2:]):
                if places == self._places():
                    self._tapes[rows, width] = inputs, places, tape
                    self.settled = True
                    return tape.replay()
                tape = self._record(inputs)
                self._keep((rows, width), (inputs, self._places(), tape))
                return tape.output
        except NotReplayable:
            self._works = False
            return None

    def _record(self, inputs: tuple) -> Capture:
        start = perf_counter()
        try:
            return Capture(lambda: self.forward(*inputs[:2]))
        except NotReplayable:
            raise
        except Exception as error:  # if it is the forward's own, that shows when it runs as it is
            logger.warning_once(f"forwards run as they are, slower, because one could not be recorded: {error}")
            raise NotReplayable(str(error)) from error
        finally:
            self._seconds_a_recording = perf_counter() - start

    def _keep(self, kind: tuple[int, int], recorded: tuple) -> None:
        self._tapes[kind] = recorded
        while len(self._tapes) > 1 and sum(tape.nbytes for *_, tape in self._tapes.values()) > MOST_KEPT:
            del self._tapes[next(iter(self._tapes))]

    def _places(self) -> list[int]:
        """Where everything lies that the cache may replace by other tensors."""
        return [tensor.data_ptr() for tensor in self.cache.static_tensors()]


def can_be_captured(model) -> bool:
    """Whether forwards of `model` over a cache of fixed size can be recorded, as far as is known before trying."""
    return (
        interpreter() is not None
        and not model.training
        and model.dtype in (torch.float32, torch.bfloat16)
        and all(parameter.device.type == "cpu" for parameter in model.parameters())
        and not is_watched(model)
        and not any("_hf_hook" in module.__dict__ for module in model.modules())  # accelerate's
    )


def is_watched(model) -> bool:
    """Whether something of the user's runs at every forward of a part of the model: hooks, a forward of its own, or what torch
    compiled."""
    return any(
        module._forward_pre_hooks
        or ("forward" in module.__dict__ and "_hf_hook" not in module.__dict__)
        or module._compiled_call_impl is not None
        or any(map(_acts, module._forward_hooks.values()))
        for module in model.modules()
    )


def is_being_watched() -> bool:
    """Whether somebody looks at every module's forward, at every operator, or collects hidden states: recorded forwards would
    not be seen."""
    collector = output_capturing._active_collector.get()
    return bool(_has_any_global_hook() or torch._C._len_torch_dispatch_stack() or collector)


@functools.cache
def padded(rows: int, columns: int) -> int:
    """How many columns a forward of so many computes. Up to `FEWEST` tokens cost what one costs."""
    fits = (width for width in WIDTHS if width >= columns and (width == 1 or rows * width >= FEWEST))
    return next(fits, columns)


def _acts(hook) -> bool:
    """Whether a hook does something: transformers' collector of hidden states stays after a forward that was asked for
    them, and does nothing without a collector in the current context."""
    collects = getattr(hook, "__qualname__", "").endswith("<locals>.output_capturing_hook")
    return not (collects and hook.__module__ == output_capturing.__name__)
