"""Devices without the Triton kernels: one message, and torch multiplies."""

import logging

import pytest
import torch

from hf_efficient.formats.affine import AffineFormat
from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.formats.w8a8 import Float8Format, Int8Format
from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.attention import api
from hf_efficient.kernels.linear import grouped
from hf_efficient.kernels.linear.layout import DequantizedLayout
from hf_efficient.planning.weight_bytes import _Accelerated, _AllocateOnCPU


FORMATS = [AffineFormat(bits=4, group_size=32, symmetric=True), TernaryFormat(), Int8Format(), Float8Format()]
FORMATS += [TrellisFormat(bits=2.5)]


@pytest.fixture
def turing(monkeypatch):
    """A machine with one GPU, of compute capability 7.5."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Quadro T4")
    monkeypatch.setattr(torch.version, "hip", None)
    for cached in (triton_devices.why_not, triton_devices.serves):
        cached.cache_clear()
    yield
    for cached in (triton_devices.why_not, triton_devices.serves):
        cached.cache_clear()


def layouts():
    for format in FORMATS:
        tensors = {
            name: torch.zeros(shape, dtype=format.dtypes(torch.float16)[name]).as_subclass(_Accelerated)
            for name, shape in format.shapes(64, 128).items()
        }
        with _AllocateOnCPU():
            yield format.layout(tensors, 128, torch.float16)


def test_old_gpus_multiply_by_torch(turing, caplog):
    with caplog.at_level(logging.WARNING, triton_devices.__name__):
        assert {type(layout) for layout in layouts()} == {DequantizedLayout}
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the Triton kernels need bfloat16 and asynchronous copies, of compute capability 8.0, and Quadro T4 has 7.5"
    ]
    assert not grouped.GroupedTritonLayout.supports(torch.device("cuda"), 32, torch.float16)


def test_attention_refuses_old_gpus(turing):
    """By the name of the implementation that serves them."""
    q = torch.zeros(1, 2, 2, 16, dtype=torch.float16).as_subclass(_Accelerated)
    assert q.is_cuda
    with pytest.raises(RuntimeError, match='Quadro T4 has 7.5: use attn_implementation="sdpa"'):
        api.check_inputs(q, q, q)


def test_gpus_of_plans_have_the_kernels(caplog):
    assert not any(isinstance(layout, DequantizedLayout) for layout in layouts())
    assert not caplog.records


def test_xpu(caplog):
    triton_devices.serves.cache_clear()
    for _ in range(2):
        assert not triton_devices.serves(torch.device("xpu"))
    assert len(caplog.records) == 1 and "not on 'xpu'" in caplog.text
    assert not triton_devices.serves(torch.device("cpu")) and len(caplog.records) == 1


def test_capability_8_is_enough(turing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert triton_devices.serves(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    assert triton_devices.serves(torch.device("cuda", 1))
