"""What the copies of offloaded pages queue on a device, and in which order."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hf_efficient.cache.stores import tiered as tiered_store


class PagesOfADevice:
    """Stands for a tensor on CUDA, or for host memory; notes in `log` what is queued, and on which stream."""

    def __init__(self, kind, log, streams):
        self.device, self.log, self.streams, self.nbytes = torch.device(kind), log, streams, 1

    def __getitem__(self, blocks):
        return self

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.log.append(("copy to", self.device.type, "on", self.streams[-1].name))

    def record_stream(self, stream):
        assert self.device.type == "cuda"
        self.log.append(("kept until", stream.name))


@pytest.mark.parametrize("to_host", [False, True])
def test_copies_wait_and_are_waited_for(monkeypatch, to_host):
    """What `_copy` queues on CUDA: the copies begin after the work queued before them, run on the side stream, in the
    order in which they were queued in both directions, keep the device's memory, and the event comes after them."""
    log, device = [], torch.device("cuda", 0)

    def stream(name):
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: log.append((name, "waits for", other.name)),
            record_event=lambda: log.append(("event of", name)) or "the event",
        )

    streams = [stream("current")]

    @contextmanager
    def use(other):
        streams.append(other)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(tiered_store, "_streams", {})
    on_device, on_host = ({"keys": PagesOfADevice(kind, log, streams)} for kind in ("cuda", "cpu"))
    destinations, sources = (on_host, on_device) if to_host else (on_device, on_host)
    blocks = torch.tensor([True, False, True, True]).numpy()
    assert tiered_store._copy(destinations, sources, blocks, device) == (2, "the event")
    copy_ = ("copy to", "cpu" if to_host else "cuda", "on", "side")
    assert log == [("side", "waits for", "current"), copy_, copy_, ("kept until", "side"), ("event of", "side")]
    assert tiered_store._side_stream(device) is tiered_store._side_stream(device)


def test_runs():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        mask = (torch.rand(13, generator=generator) < 0.6).numpy()
        runs = list(tiered_store._runs(mask))
        assert [block for first, last in runs for block in range(first, last)] == mask.nonzero()[0].tolist()
        assert all(last < first for (_, last), (first, _) in zip(runs, runs[1:]))
