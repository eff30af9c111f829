"""efficient_linear's kernels with 8-bit activations compiled for GPUs that are not here: they build, nothing spills,
and the machine code has the loads and matrix instructions it was written for."""

import pytest
import sass
from aot import compile_kernel
from linear_aot import compile_launch, stages_on, wide_loads

from hf_efficient.kernels.efficient_linear import (
    activation_quant_kernels,
    llm_int8_kernels,
    rounded_w8a8,
    w8a8,
    w8a8_configs,
    w8a8_kernels,
)


SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


def compile_product(target, kind, tokens, block_scales=False, outliers=False, tma=False, aligned=True):
    """As w8a8.launch launches it for K a multiple of 128 (or, not aligned, not even of 16), with bias; int8 with zero
    points or outliers."""
    kernel = w8a8_kernels.w8a8_kernel
    tile = w8a8_configs.choose_tile(tokens, block_scales or kind in ("fp8_as_fp16", "e5m2_as_fp16"), aligned)
    if tma:
        tile = w8a8_configs.TMA_TILES[kind]
    codes = {"int8": "*i8", "fp8": "*fp8e4nv", "fp8_as_fp16": "*u8", "e5m2_as_fp16": "*u8"}[kind]
    types = dict.fromkeys(("x_ptr", "w_ptr"), codes) | dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32")
    types |= dict.fromkeys(("x_zero_ptr", "w_zero_ptr"), "*i8") | dict.fromkeys(("x_sum_ptr", "w_sum_ptr"), "*i32")
    types |= dict.fromkeys(("bias_ptr", "out_ptr", "outlier_x_ptr"), "*bf16")
    types |= dict.fromkeys(("outlier_columns_ptr", "outlier_count_ptr", "arrivals_ptr"), "*i32")
    types["partial_ptr"] = "*i32" if kind == "int8" else "*fp32"
    split = tile.programs_per_processor > 0
    absent = [] if split else ["partial_ptr", "arrivals_ptr"]
    if kind != "int8" or outliers or tma:
        absent += ["x_zero_ptr", "w_zero_ptr", "x_sum_ptr", "w_sum_ptr"]
    if not outliers:
        absent += ["outlier_x_ptr", "outlier_columns_ptr", "outlier_count_ptr"]
    constexprs = dict(KIND=kind, BLOCK_SCALES=block_scales, EVEN_K=aligned, SPLIT=split, TMA=tma, UPCAST=False)
    constexprs |= dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m) | dict.fromkeys(absent)
    strides = ("N", "K", "stride_x", "stride_w") if aligned else ()
    return compile_launch(kernel, types, constexprs, target, tile.num_warps, stages_on(target, tile), strides)


# Triton has no tcgen05 for int8 on sm_100: mma.sync there
PRODUCTS = [
    ("sm_80", "int8", 4096, {"outliers": True}, "IMMA"),
    ("sm_80", "fp8_as_fp16", 4096, {"block_scales": True}, "HMMA"),
    ("sm_90", "int8", 16, {"outliers": True}, "IGMMA"),
    ("sm_90", "int8", 128, {}, "IGMMA"),
    ("sm_90", "int8", 4096, {"outliers": True}, "IGMMA"),
    ("sm_90", "fp8", 4096, {}, "QGMMA"),
    ("sm_90", "int8", 4096, {"tma": True}, "IGMMA"),
    ("sm_90", "fp8", 4096, {"tma": True}, "QGMMA"),
    ("sm_90", "fp8", 64, {"block_scales": True}, "QGMMA"),
    ("sm_100", "int8", 64, {}, "IMMA"),
    ("sm_100", "fp8", 4096, {}, "tcgen05.mma"),
    ("sm_100", "fp8", 4096, {"block_scales": True}, "tcgen05.mma"),
    ("gfx942", "int8", 4096, {"outliers": True}, "v_mfma_i32"),
    ("gfx942", "fp8_as_fp16", 64, {"block_scales": True}, "v_mfma_f32"),
    ("gfx942", "e5m2_as_fp16", 64, {}, "v_mfma_f32"),
]


@pytest.mark.parametrize("target, kind, tokens, options, instruction", PRODUCTS)
def test_product(target, kind, tokens, options, instruction):
    compiled = compile_product(target, kind, tokens, **options)
    assert compiled.local_bytes == 0
    assert compiled.count(instruction) > 0
    assert compiled.shared <= SHARED_MEMORY[target]
    if target == "gfx942":
        assert wide_loads(compiled, target) > 0
    elif options.get("tma"):
        assert compiled.count("UTMALDG") > 0 and compiled.count("LDGSTS") == 0
    else:
        assert compiled.count("LDGSTS.E.BYPASS.128") > 0
    if target == "sm_90" and not options:
        assert compiled.count("HMMA") + compiled.count("IMMA") + compiled.count("HGMMA") == 0


@pytest.mark.parametrize("target, kind", [("sm_90", "int8"), ("gfx942", "fp8_as_fp16")])
def test_rows_that_are_not_aligned(target, kind):
    compiled = compile_product(target, kind, 4096, block_scales=kind != "int8", aligned=False)
    assert compiled.local_bytes == 0 and compiled.count("IGMMA" if kind == "int8" else "v_mfma_f32") > 0


def compile_quantize(target, source, format, columns):
    kernel = activation_quant_kernels.quantize_rows_kernel
    types = dict.fromkeys(("x_ptr", "other_ptr", "weight_ptr", "residual_ptr", "normalised_ptr"), "*bf16")
    types |= dict(codes_ptr="*u8" if "fp8" in format else "*i8", scale_ptr="*fp32", zero_ptr="*i8", eps="fp32")
    absent = ["static_scale_ptr", "static_zero_ptr", "normalised_ptr"]
    if source == "silu_mul":
        absent += ["weight_ptr", "residual_ptr"]
    native = target in ("sm_90", "sm_100")
    constexprs = dict(SOURCE=source, FORMAT=format, NATIVE_FP8=native, BLOCK=columns) | dict.fromkeys(absent)
    warps = min(max(columns // 512, 1), 16)
    return compile_launch(kernel, types, constexprs, target, warps, 3, ("K", "stride_x", "stride_other"))


@pytest.mark.parametrize(
    "target, source, format, columns",
    [
        ("sm_80", "rms_norm", "fp8_block", 8192),
        ("sm_90", "rms_norm", "int8", 4096),
        ("sm_90", "silu_mul", "int8_asymmetric", 32768),
        ("gfx942", "silu_mul", "fp8", 16384),
    ],
)
def test_quantize(target, source, format, columns):
    compiled = compile_quantize(target, source, format, columns)
    assert compiled.local_bytes == 0
    if target == "gfx942":
        assert wide_loads(compiled, target) > 0
    else:
        assert compiled.count("LDG.E.128") > 0 and compiled.count("STG.E.128") > 0


def test_outlier_columns():
    kernel = llm_int8_kernels.outlier_columns_kernel
    signature = dict(x_ptr="*bf16", flags_ptr="*i32", M="i32", K="i32", stride_x="i32", threshold="fp32")
    compiled = compile_kernel(kernel, signature, dict(BLOCK_M=64, BLOCK_K=128), "sm_90", aligned=("K", "stride_x"))
    assert compiled.local_bytes == 0 and compiled.count("LDG.E.128") > 0
    kernel = llm_int8_kernels.quantize_inliers_kernel
    types = dict(x_ptr="*bf16", codes_ptr="*i8", scale_ptr="*fp32", M="i32", K="i32", stride_x="i32")
    constexprs = dict(BLOCK=16384, SCAN=1024)
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names if name not in constexprs}
    compiled = compile_kernel(kernel, signature, constexprs, "sm_90", 16, aligned=("K", "stride_x"))
    assert compiled.local_bytes == 0 and compiled.count("STG.E.128") > 0
    assert not sass.loops(compiled.machine_code, ("SHFL", "BAR")), "no part of K waits for the count of another"


def test_every_tile_fits_rocm():
    """Two stages of a tile of codes, or of float16 made of them."""
    for table, size in ((w8a8_configs.TILES, 1), (w8a8_configs.TILES_OF_MANY_REGISTERS, 2)):
        for tile in table.values():
            assert (tile.block_n + tile.block_m) * w8a8.STEP.value * size <= SHARED_MEMORY["gfx942"]
            assert w8a8.STEP.value % tile.block_n == 0, "a tile lies in one block of weight scales"


@pytest.mark.parametrize("target, instruction", [("sm_80", "IMMA"), ("sm_90", "IGMMA"), ("gfx942", "v_mfma")])
def test_one_token_is_rounded_by_the_product(target, instruction):
    tile = w8a8_configs.choose_tile(1, False, True)
    types = {
        "x_ptr": "*bf16",
        "up_ptr": "*bf16",
        "w_ptr": "*i8",
        "w_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "out_ptr": "*bf16",
    }
    types |= dict.fromkeys(("partial_ptr", "arrivals_ptr"), "*i32")
    constexprs = dict(EVEN_K=True, SPLIT=True, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m)
    kernel, stages = rounded_w8a8.rounded_w8a8_kernel, stages_on(target, tile)
    compiled = compile_launch(kernel, types, constexprs, target, tile.num_warps, stages, ("N", "K", "stride_w"))
    assert compiled.local_bytes == 0 and compiled.count(instruction) > 0
    assert compiled.shared <= SHARED_MEMORY[target] and wide_loads(compiled, target) > 0
