"""The 2:4 kernel compiled for GPUs that are not here."""

import pytest
from aot import TARGETS, compile_kernel

from hf_efficient.kernels.efficient_linear import sparse24, w8a8_configs


MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}


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
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    stages = min(tile.num_stages, w8a8_configs.STAGES_ON_ROCM) if target == "gfx942" else tile.num_stages
    compiled = compile_kernel(
        kernel, signature, constexprs, target, tile.num_warps, stages, aligned=("N", "K", "stride_x")
    )
    assert compiled.local_bytes == 0
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0
    assert compiled.shared <= (64 if target == "gfx942" else 99) * 1024
    if target == "gfx942":
        assert compiled.count("global_load_dwordx4") + compiled.count("buffer_load_dwordx4") > 0
    else:
        assert compiled.count("LDGSTS.E.BYPASS.128") + compiled.count("LDG.E.128") > 0
