"""Fake quantization compiled for GPUs that are not here."""

import re

import pytest
from aot import TARGETS, compile_kernel
from linear_aot import wide_loads

from hf_efficient.kernels.efficient_linear import fake_quantize


def compile_fake_quantize(target, backward, width, dtype="bf16", fp_fusion=fake_quantize.LAUNCH["enable_fp_fusion"]):
    """Codes, and weights that are made of them, in `dtype`; zero points of groups; one group a row where `width` is
    None."""
    kernel = fake_quantize.fake_quantize_gradients_kernel if backward else fake_quantize.fake_quantize_weight_kernel
    types = {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= dict.fromkeys(("rounded_ptr", "gradient_ptr"), f"*{dtype}") | dict.fromkeys(
        ("zero_value", "low", "high"), "fp32"
    )
    constexprs = fake_quantize.tile_of(width or 4096) | {"scale_group": 1, "zero_group": 1}
    constexprs |= {"PASSES_ALL": False} if backward else {"IN_DTYPE": True}
    constexprs |= {} if width else {"groups": 1}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    aligned = tuple(name for name, kind in signature.items() if kind == "i32")
    warps = fake_quantize.LAUNCH["num_warps"]
    return compile_kernel(kernel, signature, constexprs, target, warps, 3, aligned, fp_fusion=fp_fusion)


@pytest.mark.parametrize("target, width", [*((target, 64) for target in TARGETS), ("sm_90", None)])
@pytest.mark.parametrize("backward", [False, True], ids=["weight", "gradients"])
def test_no_spills_wide_accesses_and_products_rounded(target, width, backward):
    compiled = compile_fake_quantize(target, backward, width)
    assert compiled.local_bytes == 0 and compiled.registers <= 128
    lanes = 256 if target == "gfx942" else 128
    numbers = fake_quantize.ELEMENTS // lanes  # of a thread
    read, written = (numbers // 4 + 2 * numbers // 8, numbers // 4) if backward else (numbers // 4, numbers // 8)
    assert wide_loads(compiled, target) == read, "each number once, 16 bytes at a time"
    stores = "global_store_dwordx4" if target == "gfx942" else "STG.E.128"
    assert compiled.count(stores) == written
    if target == "gfx942":
        assert compiled.count("v_pk_fma") == 0, "other fused operations are those of a division"
    else:
        arithmetic = re.findall(r"\b(?:mul|add|sub|fma)\.[a-z.]*f32\b", compiled.asm["ptx"])
        assert arithmetic and all(".rn" in each and "fma" not in each for each in arithmetic)
        assert ".ftz" not in compiled.asm["ptx"], "small numbers stay"


@pytest.mark.parametrize("backward, contracted", [(False, 16), (True, 32)])
def test_a_launch_without_its_option_would_be_contracted(backward, contracted):
    """One operation a weight, and in the gradients another."""
    apart, fused = (compile_fake_quantize("sm_90", backward, 64, fp_fusion=option) for option in (False, True))
    assert fused.count("FFMA") - apart.count("FFMA") == contracted


@pytest.mark.parametrize("backward", [False, True])
def test_float32(backward):
    compiled = compile_fake_quantize("sm_90", backward, 64, "fp32")
    assert compiled.local_bytes == 0 and compiled.registers <= 128
    assert (wide_loads(compiled, "sm_90"), compiled.count("STG.E.128")) == ((12, 4) if backward else (4, 4))
