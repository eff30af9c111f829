"""Kernels of several operators compiled for GPUs that are not here: they build, spill nothing, and read weights as the
kernels of one product do."""

import pytest
from linear_aot import MATRIX_INSTRUCTION, QUADS, compile_launch, stages_on, wide_loads

from hf_efficient.kernels.efficient_linear import joined_kernels, joined_w8a8, launch_configs, norm, w8a8_configs


TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
OTHERS = ["sm_86", "sm_89", "sm_120"]  # of 99 KiB of shared memory a program
SHARED = {**dict.fromkeys(("sm_80", "sm_90", "sm_100"), 160), "gfx942": 64, **dict.fromkeys(OTHERS, 99)}


def check(compiled, instruction=""):
    # on sm_100 two words of the packed weights' kernel
    assert (
        compiled.local_bytes <= (8 if compiled.target == "sm_100" else 0)
        and compiled.shared <= SHARED[compiled.target] * 1024
    ), compiled
    assert compiled.count(instruction or MATRIX_INSTRUCTION.get(compiled.target, "HMMA")) > 0


def types(kernel, dtype, **others):
    """Of the tensors by the beginning of their names."""
    found = {}
    for name in kernel.arg_names:
        start = name.rstrip("0123456789").removesuffix("_ptr")
        if start in others:
            found[name] = others[start]
        elif name.endswith("_ptr") or start in ("weight", "bias", "out", "scale", "packed", "zero", "sums"):
            found[name] = f"*{dtype}"
    return found


def compile_dense(target, kernel=joined_kernels.joined_dense_kernel, tokens=16, dtype="bf16"):
    """As `joined_linear` launches it, of three weights without biases, K split."""
    is_gate_up = kernel is joined_kernels.gate_up_dense_kernel
    tile = launch_configs.choose_dense_tile(tokens, dtype == "fp32", is_gate_up, target == "sm_90")
    absent = dict.fromkeys(name for name in kernel.arg_names if "bias" in name)
    constexprs = dict(COUNT=3, HAS_BIAS=False, EVEN_K=True, SPLIT=True, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m)
    constexprs |= dict(BLOCK_K=tile.block_k, UPCAST=False, **absent)
    constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    kinds = types(kernel, dtype, partial="*fp32", arrivals="*i32")
    aligned = ("K", "stride_x", "stride_w")
    stages = min(tile.num_stages, 3) if target == "gfx942" else tile.num_stages
    return compile_launch(kernel, kinds, constexprs, target, tile.num_warps, stages, aligned)


@pytest.mark.parametrize("target, tokens", [*((target, 16) for target in TARGETS), ("sm_90", 64), ("sm_86", 64)])
def test_dense(target, tokens):
    compiled = compile_dense(target, tokens=tokens)
    check(compiled)
    assert wide_loads(compiled, target) > 0
    assert tokens > 16 or target == "gfx942" or compiled.registers <= 128, "four programs a multiprocessor"


@pytest.mark.parametrize(
    "target, tokens", [*((target, 64) for target in (*TARGETS, "sm_120")), ("sm_86", 16), ("sm_90", 16), ("gfx942", 16)]
)
def test_dense_gate_and_up(target, tokens):
    check(compile_dense(target, joined_kernels.gate_up_dense_kernel, tokens))


@pytest.mark.parametrize("target", [*TARGETS, "sm_89"])
def test_packed(target):
    kernel, tile = joined_kernels.joined_few_tokens_kernel, launch_configs.choose_tile(16, False, 4)
    constexprs = dict(
        COUNT=3,
        BITS=4,
        GROUP=64,
        ASYMMETRIC=True,
        HAS_BIAS=False,
        EVEN_K=True,
        PTX=target != "gfx942",
        QUADS=target in QUADS,
    )
    constexprs |= dict(SPLIT=True, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, UPCAST=False)
    constexprs |= dict.fromkeys(("bias0", "bias1", "bias2")) | dict(WARPS=0, EXCHANGE=False)
    kinds = types(kernel, "bf16", packed="*i32", zero="*u8", partial="*fp32", arrivals="*i32")
    stages = launch_configs.stages(tile, 4)
    compiled = compile_launch(kernel, kinds, constexprs, target, tile.num_warps, stages, ("K", "stride_x"))
    check(compiled)
    if target == "gfx942":  # wavefronts of 64 lanes: a part of 64 columns in 4 bits is 8 bytes a lane
        assert compiled.count("global_load_dwordx2") >= 8
    else:
        assert wide_loads(compiled, target) > 0
        assert compiled.count("I2F") < 4, "codes become numbers without conversion instructions"


@pytest.mark.parametrize("target, kind, instruction", [
    ("sm_80", "int8", "IMMA"),
    ("sm_90", "fp8", "QGMMA"),
    ("sm_100", "int8", "IMMA"),
    ("gfx942", "fp8_as_fp16", "v_mfma_f32"),
])  # fmt: skip
def test_8_bits(target, kind, instruction):
    kernel, tile = joined_w8a8.joined_w8a8_kernel, w8a8_configs.choose_tile(16, kind == "fp8_as_fp16", True)
    code = {"int8": "*i8", "fp8": "*fp8e4nv", "fp8_as_fp16": "*u8"}[kind]
    constexprs = dict(COUNT=3, KIND=kind, EVEN_K=True, SPLIT=True, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m)
    absent = ("bias0", "bias1", "bias2", "x_zero_ptr", "sums0", "sums1", "sums2")
    constexprs |= dict(UPCAST=False, **dict.fromkeys(absent))
    partial = "*i32" if kind == "int8" else "*fp32"
    kinds = types(kernel, "bf16", x=code, weight=code, x_scale="*fp32", scale="*fp32", partial=partial, arrivals="*i32")
    stages, aligned = stages_on(target, tile), ("K", "stride_x", "stride_w")
    compiled = compile_launch(kernel, kinds, constexprs, target, tile.num_warps, stages, aligned)
    check(compiled, instruction)
    assert wide_loads(compiled, target) > 0


@pytest.mark.parametrize("target", TARGETS)
def test_sum_and_norm(target):
    kernel = norm.add_rms_norm_kernel
    kinds = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "sum_ptr", "out_ptr"), "*bf16") | {"eps": "fp32"}
    aligned = ("K", "stride_x", "stride_residual")
    compiled = compile_launch(kernel, kinds, dict(BLOCK=4096), target, 8, 3, aligned)
    assert compiled.local_bytes == 0
    assert wide_loads(compiled, target) >= 3, "x, residual and weight"
