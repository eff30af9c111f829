"""The trellis kernels compiled for GPUs that are not here."""

import pytest
from aot import TARGETS
from linear_aot import MATRIX_INSTRUCTION, QUADS, compile_launch, stages_on, wide_loads

from hf_efficient.kernels.efficient_linear import trellis


def compile_product(target, tokens, half_bits=4):
    tile = trellis.TILES[tokens]
    types = {name: "*bf16" for name in ("x_ptr", "scale_ptr", "bias_ptr", "out_ptr")}
    types |= {"packed_ptr": "*i32", "places_ptr": "*i32", "partial_ptr": "*fp32", "arrivals_ptr": "*i32"}
    constexprs = dict(HALF_BITS=half_bits, EVEN_K=True, SPLIT=True, BLOCK_M=tile.block_m, BANDS=trellis.BANDS)
    constexprs |= dict(PTX=target != "gfx942", QUADS=target in QUADS, UPCAST=False)
    aligned = ("N", "K", "stride_x", "stride_packed")
    return compile_launch(
        trellis.trellis_kernel, types, constexprs, target, tile.num_warps, stages_on(target, tile), aligned
    )


@pytest.mark.parametrize(
    "tokens, half_bits, target", [(16, 4, target) for target in TARGETS] + [(64, 7, "sm_80"), (64, 7, "sm_90")]
)
def test_builds_without_spills_and_with_matrix_instructions(tokens, half_bits, target):
    compiled = compile_product(target, tokens, half_bits)
    assert compiled.local_bytes == 0 and compiled.count(MATRIX_INSTRUCTION[target]) > 0
    assert compiled.shared <= (64 if target == "gfx942" else 99) * 1024
    if target != "gfx942":  # whose 64 lanes load 8 bytes each
        assert wide_loads(compiled, target) > 0


@pytest.mark.parametrize("target", TARGETS)
def test_dequantizing_builds(target):
    types = {"packed_ptr": "*i32", "places_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16"}
    constexprs = dict(HALF_BITS=5, PTX=target != "gfx942")
    aligned = ("N", "K", "stride_packed")
    compiled = compile_launch(trellis.dequantize_trellis_kernel, types, constexprs, target, 4, 2, aligned)
    assert compiled.local_bytes == 0
    if target != "gfx942":
        assert compiled.count("STG.E.128") > 0 and compiled.count("STG.E.U16") == 0
