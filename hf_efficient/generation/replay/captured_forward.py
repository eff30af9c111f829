"""Forwards of few tokens, captured once for every number of sequences and positions and then replayed, on a CPU."""

import functools
from collections.abc import Callable
from operator import itemgetter
from time import perf_counter
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.utils import logging

from hf_efficient.cache.bookkeeping.forward_plan import tree_mask as tree_bits
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.integrations.transformers_loop import collects_hidden_states, is_collector_hook
from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.replay.cuda_graph import captures_made
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable, interpreter


logger = logging.get_logger(__name__)

EAGER_FORWARDS = 2  # the first forwards over a cache run eagerly: a capture costs about three of them
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # positions of captured forwards; others are padded to the next one
# Tokens of captured forwards of sequences end to end; others are padded to the next one. Multiples of 8 are among them,
# so that one capture serves padded drafts of eight sequences as well.
PACKED_WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)
MIN_TOKENS = 4  # of all sequences: up to so many cost what one costs, so fewer are padded
MAX_TOKENS = 128  # of all sequences: beyond, a forward takes so long that the host's time does not show
# Of the results of all captures over one cache: this share of the model's weights, or so many bytes where that is less.
# A capture takes 0.2 MB a token of SmolLM2-135M.
KEPT_SHARE, LEAST_KEPT_BYTES = 0.25, 128 << 20


DTYPES = {  # of models whose forwards are captured, by device
    "cpu": (torch.bfloat16, torch.float32),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


PACKED = "packed"
# what others may replace, but for losses, which no decoding computes
_NAMES = [name for name in dir(functional) if name[0] != "_" and not {"loss", "entropy"} & {*name.split("_")}]
_FUNCTIONS = itemgetter(*(name for name in _NAMES if callable(getattr(functional, name))))
_OF_TORCH = _FUNCTIONS(vars(functional))


class _Captured(NamedTuple):
    """inputs: the tensors that the capture reads. addresses: of the cache's tensors when it was made. layout: of the
    cache when it was last replayed."""

    inputs: tuple[torch.Tensor, ...]
    addresses: list[int]
    capture: Capture
    layout: object


def captures_so_far() -> int:
    """Captures of this process, of whatever kind: the seconds of a step with one say nothing of later steps."""
    return captures_made()


class CapturedForward:
    """`forward(tokens, positions)` of a model over `cache`, whose pool has a fixed size, captured and replayed.

    A forward that cannot be captured, as it reads tensors on the host (the routing of some experts, say), makes this
    fall back to eager forwards for good.

    Attributes:
        is_steady: whether forwards like the last one take as long from now on.
        runs_ahead: whether a call returns before its results are computed.
        is_unchanged: asked before every forward whether the model is still the one that was captured; None where no
            code of the user's runs between forwards.
        changes_model: whether the forwards so far have changed the model, None where not known: no more are captured.
        bias: T5's `distance_bias`, which the captured forwards read.
        prompt: the `CapturedPrompt` over the same cache, None before the first one.
        most_bytes: of the results of all captures that are kept.
    """

    is_steady = True
    runs_ahead = False
    is_of_cpu = True
    most_bytes = LEAST_KEPT_BYTES

    def __init__(self, forward: Callable, cache: PagedCache):
        self.forward, self.cache, self.prompt = forward, cache, None
        self.is_unchanged: Callable[[], bool] | None = None
        self.changes_model: Callable[[], bool] | None = None
        self.bias: torch.Tensor | None = None
        # by (sequences, positions), or (PACKED, sequences, tokens); the latest used last
        self._captures: dict[tuple, _Captured] = {}
        self._calls = 0
        self._falls_back = False  # to eager forwards, for good
        self._packs = self.is_of_cpu  # until a forward of sequences end to end could not be captured
        self._last_capture_seconds = 0.0

    @property
    def packs(self) -> bool:
        """Whether `packed` forwards are possible."""
        return self._packs and not self._falls_back

    def capture_seconds(self, rows: int, columns: int) -> float:
        """Seconds of capturing the next forward of `rows` sequences and `columns` positions, estimated by the latest
        capture; 0.0 where it is captured already or runs eagerly."""
        kind = rows, padded(rows, columns)
        return 0.0 if self._runs_eagerly(*kind) or kind in self._captures else self._last_capture_seconds

    def packed_capture_seconds(self, rows: int, tokens: int) -> float:
        """As `capture_seconds`, of so many tokens of all sequences end to end."""
        width = packed_width(tokens)
        is_captured = width is None or not self.packs or (PACKED, rows, width) in self._captures
        return 0.0 if is_captured else self._last_capture_seconds

    def count(self, rows: int) -> int:
        """Of how many sizes forwards of `rows` sequences are captured."""
        return sum(kind[-2] == rows for kind in self._captures)

    def positions(self, rows: int, columns: int) -> int:
        """How many positions a forward of `rows` sequences and `columns` positions computes, once it is captured if it
        can be."""
        width = padded(rows, columns)
        return columns if self._runs_eagerly(rows, width) else width

    def _runs_eagerly(self, rows: int, width: int) -> bool:
        return self._falls_back or width > WIDTHS[-1] or rows * width > MAX_TOKENS

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, tree_mask: torch.Tensor | None) -> tuple | None:
        """Runs the forward and appends `tokens` int64 [rows, columns] to the cache, with padding behind them up to one
        of `WIDTHS`. positions: int64, of the shape that the model takes. tree_mask: as in `PagedCache.decode_step`.

        Returns what `forward` returned, in tensors that the next call overwrites; None when the caller has to run the
        forward eagerly.
        """
        rows, columns = tokens.shape
        width = padded(rows, columns)
        self._calls += 1  # also those too large for a capture: `packed` ones follow them
        self.is_steady = self._runs_eagerly(rows, width)
        if self.is_steady:
            return None
        if self.is_unchanged is not None and not self.is_unchanged():
            self._falls_back = True
            return None
        if self._calls <= EAGER_FORWARDS:
            return None
        if tree_mask is None and columns > 1 and self.cache.takes_trees:  # a chain as a tree: one capture serves both
            order = torch.arange(columns, device=tokens.device)
            tree_mask = tree_bits((order <= order[:, None]).expand(rows, -1, -1))
        new = (tokens, positions) if tree_mask is None else (tokens, positions, tree_mask)
        return self._run((rows, width), new, width, lambda tree: self.cache.decode_step(width, *tree))

    def packed(
        self, tokens: torch.Tensor, positions: torch.Tensor, counts: list[int], tree_mask: torch.Tensor
    ) -> tuple | None:
        """As a call, for tokens int64 [1, n] of which sequence b has `counts[b]`, end to end. tree_mask: int64 [1, n],
        as in `PagedCache.packed_step`."""
        width = packed_width(tokens.shape[1])
        if not self.packs or width is None or self._calls < EAGER_FORWARDS:
            return None
        if self.is_unchanged is not None and not self.is_unchanged():
            self._falls_back = True
            return None
        kind = PACKED, len(counts), width
        new = tokens, positions, tree_mask
        return self._run(kind, new, width, lambda tree: self.cache.packed_step(counts, width, *tree))

    def _run(self, kind: tuple, new: tuple, width: int, step: Callable) -> tuple | None:
        """Replays the forward of `kind` on `new`, each tensor padded to `width` columns, or captures it. step: makes
        the cache's context of the forward from the tensors behind tokens and positions."""
        columns, self.is_steady = new[0].shape[-1], False
        if columns < width:
            new = [torch.cat([x, x[..., -1:].expand(*x.shape[:-1], width - columns)], -1) for x in new]
        captured = self._captures.pop(kind, None)
        inputs = tuple(tensor.clone() for tensor in new) if captured is None else captured.inputs
        for static, values in zip(inputs, new):
            static.copy_(values)
        try:
            with step(inputs[2:]):
                layout = self.cache.layout
                if captured is not None and (captured.layout is layout or captured.addresses == self._addresses()):
                    self._captures[kind] = captured._replace(layout=layout)
                    self.is_steady = True
                    return captured.capture.replay()
                capture = self._capture(kind, inputs)
                self._keep(kind, _Captured(inputs, self._addresses(), capture, layout))
                return capture.output
        except NotReplayable:
            if kind[0] == PACKED:
                self._packs = False
            else:
                self._falls_back = True
            return None

    def _capture(self, kind: tuple, inputs: tuple) -> Capture:
        start = perf_counter()
        try:
            return self.capture(lambda: self.forward(*inputs[:2]), inputs[0].numel())
        except NotReplayable:
            raise
        except Exception as error:  # an error of the forward's own shows again when it runs eagerly
            what = "drafts are padded" if kind[0] == PACKED else "forwards run eagerly"
            logger.warning_once(f"{what}, which is slower, because a forward could not be captured: {error}")
            raise NotReplayable(str(error)) from error
        finally:
            self._last_capture_seconds = perf_counter() - start

    def capture(self, forward: Callable, tokens: int, late: torch.Tensor | None = None) -> Capture:
        """As `new_capture`. Raises NotReplayable where forwards change the model, which replays would not."""
        if self.changes_model is not None and self.changes_model():
            raise NotReplayable("forwards change the model")
        return self.new_capture(forward, tokens, late)

    def new_capture(self, forward: Callable, tokens: int, late: torch.Tensor | None = None) -> Capture:
        """Captures `forward` of so many tokens of all sequences. late: as `Capture` takes it."""
        return Capture(forward, late)

    def _keep(self, kind: tuple, captured: _Captured) -> None:
        """Stores a capture; those unused for longest are dropped where all together take too much memory."""
        self._captures[kind] = captured
        while len(self._captures) > 1 and sum(c.capture.nbytes for c in self._captures.values()) > self.most_bytes:
            del self._captures[next(iter(self._captures))]

    def _addresses(self) -> list[int]:
        """Of the tensors that the cache may replace by others, such as longer tables."""
        return [tensor.data_ptr() for tensor in self.cache.static_tensors()]


def kept_bytes(model) -> int:
    """`CapturedForward.most_bytes`, in proportion to `model`."""
    return max(LEAST_KEPT_BYTES, int(KEPT_SHARE * model.get_memory_footprint()))


def can_be_captured(model) -> bool:
    """Whether captures of forwards of `model` over a cache of fixed size are tried. A capture may still fail."""
    return why_not_captured(model) is None


def why_not_captured(model) -> str | None:
    """Why forwards of `model` are not captured, None where that is tried."""
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        return f"forwards are captured on one device, and the model is on {', '.join(sorted(map(str, devices)))}"
    (device,) = devices
    if device.type != "cpu" and (reason := triton_devices.why_not(device)) is not None:
        return reason
    if device.type == "cpu" and interpreter() is None:
        return "the C++ kernels are not available (`hf-efficient doctor` says why)"
    if model.training:
        return "the model is in training mode (model.eval() ends it)"
    if model.dtype not in DTYPES[device.type]:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[device.type])
        return f"forwards are captured in {names}, and the model has {model.dtype}"
    if is_watched(model) or any("_hf_hook" in module.__dict__ for module in model.modules()):  # accelerate's
        return "hooks, a replaced forward or a compiled module would not run in captured forwards"
    return None


def is_watched(model) -> bool:
    """Whether code of the user's runs in every forward of a part of the model: hooks, a replaced `forward`, or a
    compiled module. A replay would skip it."""
    return any(
        module._forward_pre_hooks
        or ("forward" in module.__dict__ and "_hf_hook" not in module.__dict__)
        or module._compiled_call_impl is not None
        or any(not is_collector_hook(hook) for hook in module._forward_hooks.values())
        for module in model.modules()
    )


def is_being_watched() -> bool:
    """Whether something observes the forwards of all modules, all operators or functions, or hidden states in this
    context, or replaces functions of `torch.nn.functional`. It would not see replayed forwards. Or whether
    torch autocasts: it keeps cast weights until its context ends, and replays would read those of the first call."""
    modes = [type(mode) for mode in _get_current_function_mode_stack()]
    return bool(
        _FUNCTIONS(vars(functional)) != _OF_TORCH
        or any(mode is not DeviceContext and not mode.__module__.startswith("hf_efficient.") for mode in modes)
        or _has_any_global_hook()
        or any(map(torch.is_autocast_enabled, DTYPES))
        or torch._C._len_torch_dispatch_stack()
        or collects_hidden_states()
    )


@functools.cache
def padded(rows: int, columns: int) -> int:
    """How many positions a captured forward of `rows` sequences and `columns` positions computes."""
    fits = (width for width in WIDTHS if width >= columns and (width == 1 or rows * width >= MIN_TOKENS))
    return next(fits, columns)


def packed_width(tokens: int) -> int | None:
    """How many tokens a captured forward of `tokens` tokens end to end computes; None where it is too large."""
    return next((width for width in PACKED_WIDTHS if width >= tokens), None)
