"""CUDA graphs on a CPU, for tests: a capture that refuses what CUDA refuses, and computes nothing until it is
replayed."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from hf_efficient.experts import EfficientExperts
from hf_efficient.generation import ragged_model
from hf_efficient.generation.replay import graph_forward
from hf_efficient.kernels.replay import recorder
from hf_efficient.kernels.replay.host_reads import UnknownSizes


_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer, torch.Tensor.pin_memory)
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Forbidden(RuntimeError):
    """What CUDA refuses while a stream is captured."""


class _NoHost(TorchFunctionMode):
    """Refuses functions that read a tensor on the host, or copy the host's memory to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_copy = func in _FROM_HOST and (kwargs.get("device") is not None or not isinstance(args[0], (int, float)))
        if func in _READS or is_copy:
            raise Forbidden(f"{func.__name__} while a stream is captured")
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Notes every operator with its arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls, self.made = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        by_integers = func is torch.ops.aten.index.Tensor and all(
            x is None or x.dtype in (torch.int64, torch.int32) for x in args[1]
        )
        if _UNKNOWN & set(func.tags) and not by_integers:
            raise Forbidden(f"{func} reads numbers on the host while a stream is captured")
        devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()}
        to = kwargs.get("device")
        if len(devices | ({to} if to is not None and devices else set())) > 1:
            raise Forbidden(f"{func} copies between devices while a stream is captured")
        with torch._C.DisableTorchFunction():  # what an operator does inside is its own: a kernel, on a device
            result = func(*args, **kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        new = [x for x in results if x.untyped_storage().data_ptr() not in given]
        if not func.is_view and (new or func._schema.is_mutable):
            self.calls.append((func, args, kwargs, results))
            self.made += new
        return result


def is_capturing() -> bool:
    """Whether a `FakeGraph` is being captured."""
    return isinstance(_get_current_dispatch_mode(), _Recorder)


def _as_one_kernel(function):
    """`function`, one kernel on a device, for which a CPU reads numbers on the host."""

    def call(*args):
        if not is_capturing():
            return function(*args)
        capture = _get_current_dispatch_mode()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = function(*args)
        capture.calls.append((function, args, {}, [result]))
        capture.made.append(result)
        return result

    return call


class FakeGraph:
    """Stands for `GraphCapture`. `replays` counts the replays of all of them."""

    replays = 0

    def __init__(self, forward, memory, has_gradients=False):
        with torch.set_grad_enabled(has_gradients):
            forward()
        capture = _Recorder()
        with torch.set_grad_enabled(has_gradients), _NoHost(), UnknownSizes(), capture:
            self.output = forward()
        self._calls = capture.calls
        for tensor in capture.made:  # a capture computes nothing
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 0)
        self.nbytes = sum(x.nbytes for x in tree_leaves(self.output) if isinstance(x, torch.Tensor))
        self.replay()

    @torch.no_grad()
    def replay(self):
        FakeGraph.replays += 1
        for func, args, kwargs, results in self._calls:
            new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for tensor, values in zip(results, new):
                if values is not tensor:
                    tensor.copy_(values)
        return self.output


def use_fake_graphs(monkeypatch) -> None:
    """From now on forwards on the CPU are captured and replayed by the code for CUDA devices, over `FakeGraph`."""
    monkeypatch.setattr(FakeGraph, "replays", 0)
    monkeypatch.setattr(graph_forward, "GraphCapture", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(recorder, "is_graph_capturing", is_capturing)
    monkeypatch.setattr(EfficientExperts, "_run", _as_one_kernel(EfficientExperts._run))
    monkeypatch.setattr(ragged_model, "captured_forward_of", lambda device: graph_forward.GraphForward)
