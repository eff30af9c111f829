"""The 2:4 kernel compiled for GPUs that are not here."""

import pytest
from aot import TARGETS
from linear_aot import MATRIX_INSTRUCTION, compile_launch, stages_on, wide_loads

from hf_efficient.kernels.efficient_linear import sparse24


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens, four_bits", [(16, False), (16, True), (64, True)])
def test_builds_without_spills_and_with_matrix_instructions(tokens, four_bits, target):
    tile = sparse24.TILES[tokens]
    kernel = sparse24.sparse24_kernel
    types = {name: "*bf16" for name in ("x_ptr", "values_ptr", "scale_ptr", "bias_ptr", "out_ptr")}
    types |= {"places_ptr": "*u8", "zero_ptr": "*u8", "partial_ptr": "*fp32", "arrivals_ptr": "*i32"}
    constexprs = dict(FOUR_BITS=four_bits, GROUP=128 if four_bits else 0, EVEN_K=True, SPLIT=True)
    constexprs |= dict(BLOCK_M=tile.block_m, UPCAST=False)
    if four_bits:
        types["values_ptr"] = "*u8"
    else:
        constexprs |= dict(scale_ptr=None, zero_ptr=None)
    compiled = compile_launch(kernel, types, constexprs, target, tile.num_warps, stages_on(target, tile))
    assert compiled.local_bytes == 0 and compiled.count(MATRIX_INSTRUCTION[target]) > 0
    assert compiled.shared <= (64 if target == "gfx942" else 99) * 1024
    assert wide_loads(compiled, target) > 0
