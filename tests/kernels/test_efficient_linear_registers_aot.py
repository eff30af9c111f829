"""Products of up to 8 tokens in registers, compiled for GPUs that are not here."""

import pytest
import sass
from test_efficient_linear_aot import compile_linear

from hf_efficient.kernels.efficient_linear import gate_up_kernels, launch_configs


@pytest.mark.parametrize("bits, group", [(4, 64), (2, 128), (3, 0)])
@pytest.mark.parametrize("most", sorted(launch_configs.IN_REGISTERS))
def test_operands_never_leave_the_registers(bits, group, most):
    """The loop over K touches no shared memory and waits for nobody; words come in loads of 16 bytes."""
    tile = launch_configs.IN_REGISTERS[most]
    compiled = compile_linear("sm_90", bits=bits, group=group, tile=tile)
    assert compiled.local_bytes == 0
    loop = sass.loops(compiled.machine_code)[0]
    tiles, chunk = tile.block_n // 16, launch_configs.CHUNK
    assert sass.count(loop, "HMMA") == tiles * chunk // 16
    assert sass.count(loop, "LDG.E.128") >= tiles * chunk * bits // 256
    assert sass.count(loop, "LDS", "STS", "BAR", "LDGSTS", "I2F") == 0
    assert sass.count(loop, "SHFL") == (tile.exchange and chunk // 8)
    if most == 2:
        assert len(loop) <= 2.5 * 16 * tiles * chunk / 32, "instructions a weight"


def test_gate_and_up_in_registers():
    tile = launch_configs.IN_REGISTERS[8]
    assert compile_linear("sm_90", kernel=gate_up_kernels.gate_up_kernel, tile=tile).local_bytes == 0
