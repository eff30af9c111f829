"""The 2:4 kernel compiled for GPUs that are not here."""

import re

import pytest
import sass
from aot import TARGETS
from linear_aot import MATRIX_INSTRUCTION, QUADS, compile_launch, stages_on, wide_loads

from hf_efficient.kernels.efficient_linear import sparse24, sparse24_kernels


def compile_product(target, tokens, four_bits):
    """As `sparse24_linear` launches it, 4 bits with zero points in groups of 128."""
    tile = sparse24.TILES[tokens]
    types = {name: "*bf16" for name in ("x_ptr", "scale_ptr", "bias_ptr", "out_ptr")}
    types |= dict.fromkeys(("values_ptr", "places_ptr", "arrivals_ptr"), "*i32")
    types |= {"zero_ptr": "*u8", "partial_ptr": "*fp32"}
    constexprs = dict(FOUR_BITS=four_bits, GROUP=128 if four_bits else 0, EVEN_K=True, SPLIT=True, UPCAST=False)
    constexprs |= dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, PTX=target != "gfx942", QUADS=target in QUADS)
    constexprs |= dict(stride_sg=1, stride_zg=1) if four_bits else dict(scale_ptr=None, zero_ptr=None)
    return compile_launch(
        sparse24_kernels.sparse24_kernel, types, constexprs, target, tile.num_warps, stages_on(target, tile)
    )


@pytest.mark.parametrize(
    "tokens, four_bits, target",
    [
        *((16, True, target) for target in (*TARGETS, "sm_89", "sm_120")),
        *((16, False, target) for target in ("sm_80", "sm_90", "gfx942", "sm_120")),
        *((64, True, target) for target in ("sm_80", "sm_90", "sm_100", "gfx942")),
    ],
)
def test_builds_without_spills_and_with_matrix_instructions(tokens, four_bits, target):
    compiled = compile_product(target, tokens, four_bits)
    if target == "gfx942":  # scalar registers may go to lanes of vector registers
        assert (
            re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", compiled.machine_code)
            == ["0"] * 2
        )
    else:
        assert compiled.local_bytes == 0
    assert compiled.count(MATRIX_INSTRUCTION.get(target, "HMMA")) > 0
    assert compiled.shared <= (64 if target == "gfx942" else 99) * 1024
    assert wide_loads(compiled, target) > 0


@pytest.mark.parametrize("four_bits", [False, True])
def test_weights_stay_in_their_lanes(four_bits):
    """In the loop nothing is written to shared memory but what comes from memory, and nothing moves between lanes."""
    loop = sass.loops(compile_product("sm_90", 16, four_bits).machine_code)[0]
    assert not [name for name in loop if name.startswith(("STS", "SHFL", "I2F"))]
