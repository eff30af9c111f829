"""The ternary kernel compiled for GPUs that are not here."""

import pytest
from aot import TARGETS
from linear_aot import compile_launch, stages_on, wide_loads

from hf_efficient.kernels.efficient_linear import ternary


INTEGER_PRODUCT = {"sm_80": "IMMA", "sm_90": "IGMMA", "sm_100": "IMMA", "gfx942": "v_mfma_i32"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [16, 256])
def test_builds_without_spills_and_with_integer_products(tokens, target):
    tile = ternary.TILES[tokens]
    kernel = ternary.ternary_kernel
    types = {"x_ptr": "*i8", "packed_ptr": "*u8", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16"}
    types |= {"out_ptr": "*bf16", "partial_ptr": "*i32", "arrivals_ptr": "*i32"}
    constexprs = dict(EVEN_K=True, SPLIT=True, BLOCK_M=tile.block_m)
    compiled = compile_launch(kernel, types, constexprs, target, tile.num_warps, stages_on(target, tile))
    assert compiled.local_bytes == 0 and compiled.count(INTEGER_PRODUCT[target]) > 0
    if target != "gfx942":
        assert wide_loads(compiled, target) > 0
