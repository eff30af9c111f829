"""Results of a captured forward that are not needed at the same time share memory, and every value stays right."""

import random

import pytest
import torch
import torch.nn.functional as F

from hf_efficient.kernels.native import heap
from hf_efficient.kernels.replay.recorder import Capture, interpreter


pytestmark = pytest.mark.skipif(interpreter() is None, reason="needs a C++ compiler")


def test_a_chain_needs_the_memory_of_two_results():
    x = torch.randn(64, 64)

    def forward():
        y = x
        for factor in range(1, 31):
            y = y * (1 / factor) + x
        return y

    capture = Capture(forward)
    assert capture.nbytes <= 4 * x.nbytes, "of 60 results one is kept, and two are needed at once"
    for _ in range(3):
        x.copy_(torch.randn(64, 64))
        torch.testing.assert_close(capture.replay(), forward())


@pytest.mark.parametrize(("size", "times"), [(1 << 20, 1), (64, 0)], ids=["large", "small"])
def test_what_a_capture_held_goes_back_to_the_system(size, times, monkeypatch):
    x, trimmed = torch.randn(size), []
    monkeypatch.setattr(heap, "_malloc_trim", trimmed.append)
    capture = Capture(lambda: x.exp().neg().exp().neg().exp().neg().exp().neg().exp() + 1)
    assert len(trimmed) == times and torch.equal(capture.replay(), capture.output)


def test_what_somebody_else_holds_stays_where_it_is():
    x, seen = torch.randn(8, 32), []

    def forward():
        seen.append(x.exp())
        return seen[-1].sqrt().neg().abs() + 1

    capture = Capture(forward)
    x.copy_(torch.randn(8, 32))
    capture.replay()
    torch.testing.assert_close(seen[0], x.exp())


def test_results_that_calls_read_and_make_stay():
    x = torch.randn(8, 32)

    def forward():
        y = x * 2 + 1
        z = y.sort(-1).values  # no instruction
        return z * 3 + y * 0.5

    capture = Capture(forward)
    for _ in range(2):
        x.copy_(torch.randn(8, 32))
        torch.testing.assert_close(capture.replay(), forward())


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_reads(seed):
    """Programs in which each operator reads any of the results so far: whole ones, halves of them, and some in
    place."""
    chance = random.Random(seed)
    inputs = [torch.randn(4, 32).bfloat16() for _ in range(2)]
    weight = torch.randn(32, 32).bfloat16() * 32**-0.5
    choices = [(chance.randrange(7), chance.random(), chance.random()) for _ in range(40)]

    def forward():
        found = [x * 1 for x in inputs]
        for kind, first, second in choices:
            a, b = (found[int(share * len(found))] for share in (first, second))
            if kind == 0:
                y = F.linear(a, weight)
            elif kind == 1:
                y = torch.cat([a[:, 16:], b[:, :16]], -1)
            elif kind == 2:
                y = F.silu(a) * b.sigmoid()
            elif kind == 3:
                y = a - b.mean(-1, keepdim=True)
            elif kind == 4:
                y = a.tanh().clone()
                y[:2] = b[2:]
            else:
                y = (a + b) * 0.5
            found.append(y)
        return found[-1], found[-7] + found[5]

    capture = Capture(forward)
    for _ in range(2):
        for x in inputs:
            x.copy_(torch.randn(4, 32))
        for output, expected in zip(capture.replay(), forward()):
            torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)  # roundings to bfloat16
    assert capture.nbytes < 30 * inputs[0].nbytes, "of more than 60 results"
