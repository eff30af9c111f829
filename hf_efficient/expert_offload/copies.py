"""Copies of the weights of one expert to a device, beside what it computes."""

from concurrent.futures import ThreadPoolExecutor

import torch


Tensors = dict[str, torch.Tensor]


class Arrival:
    """Tensors that are on their way."""

    def __init__(self, tensors: Tensors, wait=None):
        self._tensors, self._wait = tensors, wait

    def wait(self) -> Tensors:
        """The tensors. What is queued on the device from now on finds them whole."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._tensors


class Copier:
    """Copies to `device`: on an accelerator from pinned memory, on a stream of their own; on a CPU in a thread where
    they are made ahead, else at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self._backend = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = self._threads = None

    def start(self, sources: Tensors, into: Tensors | None, ahead: bool) -> Arrival:
        """Begins to copy `sources`. into: tensors like them on the device, whose values no work to come reads; None for
        new ones. ahead: whether something else is to be computed before."""
        with torch.inference_mode(False):
            if into is None:
                into = {name: torch.empty_like(tensor, device=self.device) for name, tensor in sources.items()}
            if self._backend is not None:
                return self._on_stream(sources, into)
            if not ahead:
                _copy(sources, into)
                return Arrival(into)
        self._threads = self._threads or ThreadPoolExecutor(1, thread_name_prefix="experts")
        return Arrival(into, self._threads.submit(_copy, sources, into).result)

    def _on_stream(self, sources: Tensors, into: Tensors) -> Arrival:
        self._stream = self._stream or self._backend.Stream(self.device)
        self._stream.wait_stream(self._backend.current_stream(self.device))  # what it computes may still read `into`
        with self._backend.stream(self._stream):
            _copy(sources, into)
        for tensor in into.values():
            tensor.record_stream(self._stream)
        event = self._stream.record_event()
        return Arrival(into, lambda: self._backend.current_stream(self.device).wait_event(event))


@torch.no_grad()
def _copy(sources: Tensors, into: Tensors) -> None:
    for name, tensor in sources.items():
        into[name].copy_(tensor, non_blocking=True)
