"""efficient_linear's kernels compiled for GPUs that are not here: they build, nothing spills, and the machine code has
the loads and matrix instructions it was written for."""

import re

import pytest
import sass
from aot import TARGETS, compile_kernel
from linear_aot import MATRIX_INSTRUCTION, QUADS, compile_launch, wide_loads

from hf_efficient.kernels.efficient_linear import (
    dequantize_kernels,
    gate_up_kernels,
    launch_configs,
    weight_only,
    weight_only_kernels,
)
from hf_efficient.kernels.efficient_linear.codebook_fragments import GATHER, PERMUTE


FEW, MANY = weight_only_kernels.few_tokens_kernel, weight_only_kernels.many_tokens_kernel


def compile_linear(
    target,
    tokens=16,
    kernel=None,
    dtype="bf16",
    bits=4,
    group=64,
    asymmetric=True,
    lookup=0,
    per_row=False,
    tile=None,
    **constants,
):
    """As weight_only_linear launches it for even K, with bias, K split, and the groups of a row side by side;
    `constants` replaces run-time arguments by values."""
    tile = tile or launch_configs.choose_tile(tokens, dtype == "fp32", bits)
    kernel = kernel or (FEW if tile.programs_per_processor else MANY)
    constexprs = dict(BITS=bits, GROUP=group, ASYMMETRIC=asymmetric, HAS_BIAS=True, EVEN_K=True, SPLIT=True)
    constexprs |= dict(LOOKUP=lookup, PER_ROW=per_row, PTX=target != "gfx942", QUADS=target in QUADS)
    constexprs |= dict(BLOCK_N=tile.block_n, BLOCK_M=tile.block_m, UPCAST=False)
    constexprs |= weight_only.register_options(tile)
    constexprs["stride_sg"] = 1 if group else 0
    if asymmetric:
        constexprs["stride_zg"] = constexprs["stride_sg"]
    constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names} | constants
    types = {"packed": "*i32", "zero": "*u8", "partial": "*fp32", "arrivals": "*i32"}
    signature = {}
    for name in kernel.arg_names:
        if (name.startswith("zero") and not asymmetric) or (name == "codebook_ptr" and not lookup):
            constexprs[name] = None
        elif name not in constexprs:
            signature[name] = types.get(name.split("_")[0], f"*{dtype}") if name.endswith("_ptr") else "i32"
    aligned = tuple(name for name in ("N", "K", "stride_x") if name in signature)
    stages = launch_configs.stages(tile, bits)
    return compile_kernel(kernel, signature, constexprs, target, tile.num_warps, stages, aligned)


@pytest.mark.parametrize(
    "target, tokens, dtype",
    [
        *((target, tokens, "bf16") for target in ("sm_90", "gfx942") for tokens in (16, 64, 256)),
        *(("sm_80", 16, "bf16"), ("sm_80", 64, "bf16"), ("sm_100", 16, "bf16"), ("sm_100", 256, "bf16")),
        ("sm_90", 64, "fp16"),
    ],
)
def test_four_bits(target, tokens, dtype):
    compiled = compile_linear(target, tokens, dtype=dtype)
    assert compiled.local_bytes == 0
    assert compiled.registers <= (128 if tokens == 16 else 256), "two or more programs fit a multiprocessor"
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0
    assert wide_loads(compiled, target) > 0
    if target != "gfx942":
        assert compiled.count("I2F") == 0, "codes become numbers without conversion instructions"


def check_hopper_loop(compiled, bits, group, instructions):
    """In the loop over K packed words come by asynchronous copies of 16 bytes a lane, nothing else is written to shared
    memory, nothing moves between lanes, and there are the two barriers of the pipeline. At most `instructions` a
    weight."""
    assert compiled.local_bytes == 0
    loop = main_loop(compiled.machine_code)
    columns = 256  # of a round
    assert sum(name.startswith("HGMMA") for name in loop) == columns // 16, "64 rows by 16 columns each"
    blocks = columns * bits // 256
    copies_of_x = 0 if group == 32 else columns * 16 * 2 // (128 * 16)  # 8 bytes a lane for 32 columns
    assert sum(name.startswith("LDGSTS.E.BYPASS.128") for name in loop) == blocks + copies_of_x
    assert not [name for name in loop if name.startswith(("STS", "SHFL", "I2F"))]
    assert sum(name.startswith("BAR") for name in loop) <= 4
    assert len(loop) <= instructions * columns // 2, "64 rows by the columns of a round, over 128 threads"


@pytest.mark.parametrize(
    "bits, group, asymmetric, instructions",
    [
        (2, 64, False, 3.5),
        (2, 32, True, 5.5),
        (3, 64, False, 3.5),
        (3, 64, True, 4),
        (4, 64, False, 3.7),
        (4, 64, True, 4.2),
        (4, 0, True, 3.7),
        (8, 32, False, 7),
        (8, 128, True, 6),
    ],
)
def test_weights_go_straight_to_the_registers_of_hopper_matrix_instructions(bits, group, asymmetric, instructions):
    compiled = compile_linear("sm_90", bits=bits, group=group, asymmetric=asymmetric)
    check_hopper_loop(compiled, bits, group, instructions)


@pytest.mark.parametrize("bits, per_row, instructions", [(2, True, 3.7), (3, False, 3.8), (4, True, 5.1)])
def test_codebooks_stay_in_registers(bits, per_row, instructions):
    compiled = compile_linear("sm_90", bits=bits, asymmetric=False, lookup=PERMUTE.value, per_row=per_row)
    check_hopper_loop(compiled, bits, 64, instructions)
    loads = sum(name.startswith("LDG.") for name in main_loop(compiled.machine_code))
    # and one for the loop's end, which has another layout
    assert loads in (8, 9), "scales of two rows for every group of 64 columns"


@pytest.mark.parametrize("target, lookup", [("sm_80", PERMUTE), ("sm_100", PERMUTE), ("gfx942", GATHER)])
def test_codebooks_elsewhere(target, lookup):
    compiled = compile_linear(target, 64, asymmetric=False, lookup=lookup.value, per_row=True, group=128)
    assert compiled.local_bytes == 0 and compiled.count(MATRIX_INSTRUCTION[target]) > 0


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_gate_and_up(target):
    compiled = compile_linear(target, 64, gate_up_kernels.gate_up_kernel)
    assert compiled.local_bytes == 0 and compiled.count(MATRIX_INSTRUCTION[target]) > 0
    if target == "sm_80":
        assert compiled.count("LDGSTS.E.BYPASS.128") > 0


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
    assert compile_linear("sm_80", tokens, bits=8, EVEN_K=False).local_bytes == 0


@pytest.mark.parametrize("target, tokens, group", [("sm_80", 64, 64), ("sm_100", 256, 32), ("gfx942", 256, 128)])
def test_the_long_steps_of_three_bits(target, tokens, group):
    compiled = compile_linear(target, tokens, bits=3, group=group)
    assert compiled.local_bytes == 0 and compiled.shared <= 64 * 1024
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0


@pytest.mark.parametrize("tokens", sorted(launch_configs.FLOAT32_INPUT))
def test_float32(tokens):
    assert compile_linear("sm_90", tokens, dtype="fp32").local_bytes == 0


@pytest.mark.parametrize(
    "target, bits, lookup",
    [
        *(("sm_90", bits, lookup) for bits, lookup in ((2, 0), (3, 0), (4, 0), (8, 0), (4, PERMUTE))),
        *(("sm_80", 3, 0), ("sm_80", 4, PERMUTE), ("sm_120", 2, 0), ("sm_120", 4, 0), ("sm_120", 8, 0)),
    ],
)
def test_tile_of_eight_tokens(target, bits, lookup, monkeypatch):
    """Weights and tokens are in registers: nothing waits for a group of warps, and nothing moves between lanes."""
    monkeypatch.setattr(launch_configs, "choose_tile", lambda *_: launch_configs.SMALL)
    options = dict(lookup=lookup.value, asymmetric=False) if lookup else {}
    compiled = compile_linear(target, 8, bits=bits, QUADS=True, **options)
    assert compiled.local_bytes == 0 and compiled.registers <= (80 if target == "sm_90" else 128)
    assert compiled.count("HGMMA") == 0 and compiled.count("SHFL") == 0
    loop = max(sass.loops(compiled.machine_code), key=lambda names: sass.count(names, "HMMA"))
    assert sass.count(loop, "HMMA") == 16 and sass.count(loop, "STS") == 0
    most = {2: 3.2, 3: 3.7, 4: 4.3, 8: 5}[bits] * 256 // 2  # 64 rows by 256 columns, over 128 threads
    assert target != "sm_90" or len(loop) <= most


def test_specialised_to_one_row_and_column():
    """A launch turns arguments that are 1 into constants."""
    ones = dict(N=1, K=1, stride_x=1, stride_sn=1, stride_sg=1, stride_zn=1, stride_zg=1)
    assert compile_linear("sm_90", EVEN_K=False, **ones).local_bytes == 0


STORED = ((2, 32, 0, False), (3, 64, 0, False), (8, 0, 0, False), (4, 64, PERMUTE, True))


@pytest.mark.parametrize(  # every two targets share the four
    "target, bits, group, lookup, per_row",
    [(target, *STORED[place]) for i, target in enumerate(TARGETS) for place in (i // 2, 2 + (i + i // 2) % 2)],
)
def test_dequantize(target, bits, group, lookup, per_row):
    """Weights change lanes as 16-bit numbers, and rows are stored in pieces of 16 bytes."""
    kernel = dequantize_kernels.dequantize_kernel
    types = {"packed": "*i32", "scale": "*bf16", "zero": "*u8", "codebook": "*bf16", "out": "*bf16"}
    types = {f"{name}_ptr": type for name, type in types.items()}
    if lookup:
        constexprs = dict(zero_ptr=None, ASYMMETRIC=False, LOOKUP=(GATHER if target == "gfx942" else PERMUTE).value)
    else:
        constexprs = dict(codebook_ptr=None, ASYMMETRIC=True, LOOKUP=0)
    constexprs |= dict(BITS=bits, GROUP=group, PER_ROW=per_row, PTX=target != "gfx942", BLOCK_N=64)
    compiled = compile_launch(kernel, types, constexprs, target, 4, 3, ("N", "K"))
    assert compiled.local_bytes == 0
    columns = 256 if bits == 3 else 128
    assert compiled.shared <= 64 * 128 * 2, "16 bits each"
    if target != "gfx942":
        assert compiled.count("LDG.E.128") == columns * bits // 256
        assert compiled.count("STG.E.128") == 64 * columns * 2 // (128 * 16) == compiled.count("STG")
