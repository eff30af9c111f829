"""efficient_linear's kernels compiled for GPUs that are not here: they build, nothing spills, and the machine code has
the loads and matrix instructions it was written for."""

import re

import pytest
from aot import TARGETS, compile_kernel

from hf_efficient.kernels.efficient_linear import launch_configs, weight_only_kernels


FEW, MANY = (
    (weight_only_kernels.few_tokens_kernel, launch_configs.SIXTEEN_BIT_INPUT[16]),
    (weight_only_kernels.many_tokens_kernel, launch_configs.SIXTEEN_BIT_INPUT[256]),
)
MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}


def compile_linear(kernel, tile, target, dtype="bf16", bits=4, group=64, asymmetric=True, **constants):
    """As weight_only_linear launches it for even K, with bias, K split; `constants` replaces run-time arguments by
    values."""
    types = {
        "x_ptr": f"*{dtype}",
        "packed_ptr": "*i32",
        "scale_ptr": f"*{dtype}",
        "zero_ptr": "*u8",
        "bias_ptr": f"*{dtype}",
        "out_ptr": f"*{dtype}",
        "partial_ptr": "*fp32",
        "arrivals_ptr": "*i32",
    }
    constexprs = dict(BITS=bits, GROUP=group, ASYMMETRIC=asymmetric, HAS_BIAS=True, EVEN_K=True, SPLIT=True)
    constexprs |= dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, UPCAST=False)
    constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names} | constants
    if not asymmetric:
        constexprs["zero_ptr"] = None
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    aligned = tuple(name for name in ("N", "K", "stride_x") if name not in constexprs and name in kernel.arg_names)
    return compile_kernel(kernel, signature, constexprs, target, tile.num_warps, tile.num_stages, aligned)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kernel, tile", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("target", TARGETS)
def test_four_bits(target, kernel, tile, dtype):
    compiled = compile_linear(kernel, tile, target, dtype)
    assert compiled.local_bytes == 0
    assert compiled.registers <= (256 if kernel is MANY[0] else 128), "two or more programs fit a multiprocessor"
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0
    if target == "gfx942":
        assert compiled.count("global_load_dwordx4") + compiled.count("buffer_load_dwordx4") > 0
    else:
        assert compiled.count("LDGSTS.E.BYPASS.128") + compiled.count("LDG.E.128") > 0
        assert compiled.count("I2F") == 0, "codes become numbers without conversion instructions"


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits, group", [(4, 32), (4, 64), (4, 0), (8, 32), (8, 128)])
def test_weights_go_straight_to_the_registers_of_hopper_matrix_instructions(bits, group, asymmetric):
    """In the loop over K nothing is written to shared memory but by the asynchronous copies, nothing moves between
    lanes, and there are the two barriers of the pipeline."""
    compiled = compile_linear(*FEW, "sm_90", bits=bits, group=group, asymmetric=asymmetric)
    assert compiled.local_bytes == 0
    loop = main_loop(compiled.machine_code)
    assert sum(name.startswith("HGMMA") for name in loop) == 8, "64 rows by 128 columns: eight of 16 columns"
    assert sum(name.startswith("LDGSTS.E.BYPASS.128") for name in loop) >= bits // 4 * 2
    assert not [name for name in loop if name.startswith(("STS", "SHFL", "I2F"))]
    assert sum(name.startswith("BAR") for name in loop) == 2
    assert len(loop) <= (9 if bits == 8 else 6) * 64, "instructions a thread, for its 64 weights"


def main_loop(sass: str) -> list[str]:
    """Mnemonics of the longest loop that holds a matrix instruction."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)([^;]*);", sass, re.M)
    loops = []
    for address, name, operands in lines:
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name.startswith("BRA") and target and int(target[1], 16) < int(address, 16):
            body = [n for a, n, _ in lines if int(target[1], 16) <= int(a, 16) <= int(address, 16)]
            loops.append(body if any(n.startswith("HGMMA") for n in body) else [])
    return max(loops, key=len)


@pytest.mark.parametrize("tokens", sorted(launch_configs.SIXTEEN_BIT_INPUT))
def test_every_tile_of_the_table_keeps_its_registers(tokens):
    tile = launch_configs.SIXTEEN_BIT_INPUT[tokens]
    kernel = FEW[0] if tile.programs_per_processor else MANY[0]
    assert compile_linear(kernel, tile, "sm_80", bits=8, EVEN_K=False).local_bytes == 0


@pytest.mark.parametrize("tokens", sorted(launch_configs.FLOAT32_INPUT))
def test_float32(tokens):
    tile = launch_configs.FLOAT32_INPUT[tokens]
    kernel = FEW[0] if tile.programs_per_processor else MANY[0]
    assert compile_linear(kernel, tile, "sm_90", "fp32").local_bytes == 0


def test_specialised_to_one_row_and_column():
    """A launch turns arguments that are 1 into constants."""
    ones = dict(N=1, K=1, stride_x=1, stride_sn=1, stride_sg=1, stride_zn=1, stride_zg=1)
    assert compile_linear(*FEW, "sm_90", EVEN_K=False, **ones).local_bytes == 0


@pytest.mark.parametrize("target, bits", [("sm_80", 8), ("sm_90", 4), ("sm_100", 8), ("gfx942", 4)])
def test_dequantize(target, bits):
    kernel = weight_only_kernels.dequantize_kernel
    types = {"packed_ptr": "*i32", "scale_ptr": "*bf16", "zero_ptr": "*u8", "out_ptr": "*bf16"}
    constexprs = dict(BITS=bits, GROUP=64, ASYMMETRIC=True, BLOCK_N=64)
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    compiled = compile_kernel(kernel, signature, constexprs, target, aligned=("N", "K"))
    assert compiled.local_bytes == 0
    if target != "gfx942":
        assert compiled.count("LDG.E.128") > 0 and compiled.count("STG.E.128") > 0
