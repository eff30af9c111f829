"""The mixture-of-experts kernel compiled for GPUs that are not here."""

import pytest
from aot import TARGETS
from linear_aot import MATRIX_INSTRUCTION, QUADS, compile_launch, wide_loads

from hf_efficient.kernels.efficient_linear import grouped, launch_configs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens, bits", [(16, 4), (64, 8)])
def test_builds_without_spills_and_with_matrix_instructions(tokens, bits, target):
    tile = launch_configs.SIXTEEN_BIT_INPUT[tokens]
    kernel = grouped.grouped_kernel
    types = {name: "*bf16" for name in ("x_ptr", "scale_ptr", "bias_ptr", "out_ptr")}
    types |= {"packed_ptr": "*i32", "zero_ptr": "*u8", "offsets_ptr": "*i32"}
    constexprs = dict(E=60, BLOCK_E=64, BITS=bits, GROUP=64, ASYMMETRIC=True, HAS_BIAS=False, EVEN_K=True)
    constexprs |= dict(
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        UPCAST=False,
        bias_ptr=None,
        PTX=target != "gfx942",
        QUADS=target in QUADS,
    )
    aligned = ("N", "K", "stride_x", "stride_packed")
    stages = launch_configs.stages(tile, bits)
    compiled = compile_launch(kernel, types, constexprs, target, tile.num_warps, stages, aligned)
    # on sm_80 and sm_100 two words outside the loop
    assert (
        compiled.local_bytes <= (8 if target in ("sm_80", "sm_100") else 0)
        and compiled.count(MATRIX_INSTRUCTION[target]) > 0
    )
    if target == "gfx942":  # wavefronts of 64 lanes: a part of 64 columns in 4 bits is 8 bytes a lane
        assert compiled.count("global_load_dwordx4" if bits == 8 else "global_load_dwordx2") >= 8
    else:
        assert wide_loads(compiled, target) > 0
