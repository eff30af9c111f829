"""The ternary kernel compiled for GPUs that are not here."""

import pytest
from aot import TARGETS, compile_kernel

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
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    stages = 2 if target == "gfx942" else tile.num_stages
    compiled = compile_kernel(
        kernel, signature, constexprs, target, tile.num_warps, stages, aligned=("N", "K", "stride_x")
    )
    assert compiled.local_bytes == 0
    assert compiled.count(INTEGER_PRODUCT[target]) > 0
    if target != "gfx942":
        assert compiled.count("LDGSTS.E.BYPASS.128") + compiled.count("LDG.E.128") > 0
