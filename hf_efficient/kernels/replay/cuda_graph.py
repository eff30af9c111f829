"""A forward on a CUDA device captured once as a CUDA graph and replayed: one launch by the host for all its kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch.utils._pytree import tree_leaves

from hf_efficient.kernels.replay.host_reads import UnknownSizes


def on_device(device: torch.device) -> AbstractContextManager:
    """Inside, `device` is the current CUDA device; nothing changes for another kind of device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_captures = [0]


def capture_made() -> None:
    """Called by each capture, on a CPU, too."""
    _captures[0] += 1


def captures_made() -> int:
    """How many captures this process has made: the seconds of a step with one say nothing of later steps."""
    return _captures[0]


def is_graph_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


COUNTERS = 1 << 14  # int32 numbers: a kernel that splits its work counts the programs of each tile of its result
_counters_in: list[Callable[[torch.Tensor], AbstractContextManager]] = []


def counts_in(context: Callable[[torch.Tensor], AbstractContextManager]) -> None:
    """Registers a family of kernels that count in memory which is zero before and after each. Inside `context(buffer)`
    they count in `buffer`, int32 zeros, so that a graph need not clear counters before every kernel."""
    _counters_in.append(context)


class GraphCapture:
    """Runs `forward()` once on the current device, captures it and replays it. `replay()` computes the same from what
    the input tensors hold by then, and waits for nothing.

    The first run compiles kernels and allocates what libraries keep, which a capture forbids. So `forward` runs three
    times on the same inputs, and has to write the same each time, as appending to a cache at given lengths does.

    Args:
        forward: touches no memory of the host, and waits for no kernel.
        memory: `torch.cuda.graph_pool_handle()`, shared by captures that are replayed one after the other.
        has_gradients: whether autograd is on inside; `forward` then calls `backward` itself.

    Attributes:
        output: what `forward` returned; a replay overwrites its tensors.
        nbytes: of the tensors of `output`.

    Raises RuntimeError where the forward does what a capture forbids.
    """

    def __init__(self, forward: Callable, memory: tuple[int, int], has_gradients: bool = False):
        capture_made()
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.set_grad_enabled(has_gradients), torch.cuda.stream(stream):
            forward()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads of the program may allocate meanwhile
        graph = torch.cuda.graph(self._graph, pool=memory, stream=stream, capture_error_mode="thread_local")
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")
        try:
            with ExitStack() as stack:
                counters = [use(self._counters) for use in _counters_in]
                for context in (torch.set_grad_enabled(has_gradients), UnknownSizes(), *counters, graph):
                    stack.enter_context(context)
                self.output = forward()
        except Exception:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own where a capture cannot end
            raise
        tensors = [x for x in tree_leaves(self.output) if isinstance(x, torch.Tensor)]
        self.nbytes = sum(x.nbytes for x in tensors)
        self.replay()

    def replay(self):
        """Queues the kernels on the current stream, and returns `output`."""
        self._graph.replay()
        return self.output
