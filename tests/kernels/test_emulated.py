"""The kernels of ARM beside those of this CPU, and the emulator that runs them."""

import ctypes

import emulated
import pytest
import torch

from hf_efficient.kernels.linear import native_cpu
from hf_efficient.kernels.linear.codes import pack_codes
from hf_efficient.kernels.native import compiler, tiers
from hf_efficient.kernels.replay.instructions import OPS, Instruction, interpreter, operand, sizes


pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(emulated.why_not() is not None, reason=emulated.why_not() or ""),
]


@pytest.mark.skipif(compiler.compiler() is None or tiers.tier() is tiers.TORCH, reason="no C++ kernels for this CPU")
@pytest.mark.parametrize("tier", emulated.CPUS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integer_products_have_the_bits_of_this_cpu(bits, tier, monkeypatch):
    n, k, group = 70, 1000, 32
    codes = pack_codes(torch.randint(2**bits, (n, k), dtype=torch.uint8), bits)
    scale, zero = torch.rand(n, -(-k // group)).bfloat16(), torch.randint(2**bits, (n, -(-k // group))).to(torch.uint8)
    arguments = codes, scale, zero, bits, group, k, torch.bfloat16
    inputs, results = [torch.randn(rows, k).bfloat16() for rows in (1, 2, 7)], []
    for _ in range(2):
        layout = native_cpu.NativeCodesLayout.pack(*arguments, rounds_inputs=True)
        results.append([layout.matmul(x) for x in inputs])
        emulated.use(tier, monkeypatch)
    assert all(torch.equal(own, other) for own, other in zip(*results))


@pytest.mark.parametrize("tier", emulated.CPUS)
def test_what_is_written_and_nothing_else(tier, monkeypatch):
    """Results across pages, beside numbers that must stay."""
    emulated.use(tier, monkeypatch)
    x, y = torch.randn(3000), torch.full((5000,), 7.0)
    copy = Instruction(OPS["NEG"], sizes(x.shape), operand(y[1001:4001]), operand(x))
    assert interpreter()(ctypes.addressof(copy), 1) == 0
    assert torch.equal(y[1001:4001], -x) and (y[:1001] == 7).all() and (y[4001:] == 7).all()


@pytest.mark.parametrize("tier", emulated.CPUS)
def test_an_address_that_is_not_there(tier):
    """Is an error, and the end of that emulator."""
    library = emulated.Library(tier, "replay", {}, emulated.Emulator(emulated.CPUS[tier]))
    copy = Instruction(OPS["NEG"], sizes([1]), operand(torch.zeros(1)), operand(torch.zeros(1)))
    copy.a.data = 8
    with pytest.raises(RuntimeError, match="no such address 8"):
        library.hf_replay(ctypes.addressof(copy), 1)
