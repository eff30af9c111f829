"""The decode kernels compiled for four GPUs: no spills, shared memory that fits, matrix instructions, wide loads."""

import math
import re

import pytest
import sass
from test_flash_paged_aot import DTYPES, SHARED
from test_flash_paged_aot import build as compile_launched

from hf_efficient.kernels.flash_paged import config, decode, decode_codes


BITS = {None: 16, "int8": 8, "fp8": 8, "int4": 4, "int2": 2}
# Most loads and stores of spilled registers in a loop. With them, one warp of 32 keys of so few bits was the fastest
# configuration on an H200; it has all 255 registers that a thread can have.
SPILLED = {"int4": 30, "int2": 30}
OPTIONAL = {"lse": "*fp32", "sinks": "*fp32", "slopes": "*fp32", "tree_mask": "*i64"}


def power_of_two(dim):
    return max(16, 1 << (dim - 1).bit_length())


def build(
    target, name, dim, page_size, value_dim=None, rows=4, dtype="bf16", options=False, packed=False, tiles=math.inf
):
    """As `attend_few` launches it: one query of `rows` heads that share a key head, keys of format `name` in pages,
    groups of 64 tokens; `options`: a token tree and every option; packed: queries of packed sequences; tiles: as of
    `decode_config`."""
    value_dim, bits = value_dim or dim, BITS[name]
    backend = "amd" if target == "gfx942" else "nvidia"
    constexprs = {"GROUP": rows, "HEAD_DIM": dim, "VALUE_DIM": value_dim, "PAGE_SIZE": page_size, "BLOCK_B": 32}
    if name is None:
        tile = config.decode_config(DTYPES[dtype], max(dim, value_dim), rows, backend, tiles)
        kernel, block_dv = decode.decode_kernel, power_of_two(value_dim)
        constexprs |= {"BLOCK_N": tile.block_n, "BLOCK_D": power_of_two(dim), "BLOCK_DV": block_dv}
        registers = tile.registers
    else:
        codes = config.codes_config(max(dim, value_dim), rows, bits, page_size if bits == 8 else 64, backend)
        kernel, tile = (
            decode_codes.decode_codes_kernel,
            config.Config(codes.block_m, codes.keys * codes.warps, codes.warps, 1),
        )
        sizes = [max(32, power_of_two(d * bits // 8)) for d in (dim, value_dim)]
        constexprs |= {
            "WARPS": codes.warps,
            "KEYS": codes.keys,
            "BYTES": sizes[0],
            "VALUE_BYTES": sizes[1],
            "BLOCK_D": power_of_two(dim),
        }
        constexprs |= {"BITS": bits, "IS_FLOAT": name == "fp8", "TOKENS": 1, "CHANNEL_GROUPS": 1, "RING": 0}
        constexprs["PTX"], block_dv = backend == "nvidia", sizes[1] * 8 // bits
        constexprs |= {"VALUES_AHEAD": codes.values_ahead, "MOVE": codes.move and dtype != "fp32"}
        registers = codes.registers
    real_rows = min(tile.block_m, 1 << (rows - 1).bit_length())
    step = decode.parts_at_once(real_rows, block_dv, (tile if name is None else codes).programs_per_processor)
    constexprs |= {"BLOCK_M": tile.block_m, "ROWS": real_rows, "STEP": step}
    constexprs |= {"HAS_LEFT": options, "HAS_RIGHT": True, "SOFTCAP": options}
    pointers = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("partial", "statistics"), "*fp32")
    pointers |= dict.fromkeys(("arrivals", "cache_seqlens", "block_table"), "*i32")
    pointers |= OPTIONAL if options else dict.fromkeys(OPTIONAL)
    if name is None:
        pointers["cu_seqlens_q"] = "*i32" if packed else None
    pointers |= dict.fromkeys(("k", "v"), f"*{dtype}" if name is None else "*i32")
    if name is not None:
        pointers |= dict.fromkeys(("k_scale", "v_scale"), "*fp16")
        grouped = {**dict.fromkeys(("k_min", "v_min"), "*fp16"), **dict.fromkeys(("k_tail", "v_tail"), f"*{dtype}")}
        grouped["quantized_seqlens"] = "*i32"
        pointers |= grouped if bits < 8 else dict.fromkeys(grouped)
    if bits < 8:
        constexprs |= {"TOKENS": 64, "RING": 128}
    unaligned = ["stride_table", "stride_slopes", "stride_vsb", "stride_vst", "stride_vsh"]
    if bits == 8:
        unaligned += ["stride_ksb", "stride_ksg", "stride_ksh"]
    return compile_launched(
        kernel, constexprs, pointers, target, tile, unaligned, registers if backend == "nvidia" else None
    )


def check(compiled, spilled):
    """Only addresses for the end of a lane may spill: no more than `spilled` in a loop over keys."""
    if compiled.target == "gfx942":
        # Scalar registers are spilled into lanes of vector registers (many strides), which costs no memory traffic.
        memory = (".vgpr_spill_count", ".private_segment_fixed_size")
        assert all(re.findall(rf"{re.escape(key)}:\s*(\d+)", compiled.asm["amdgcn"]) == ["0"] for key in memory)
    else:
        loops = sass.loops(compiled.machine_code)
        assert max(sass.count(loop, "LDL", "STL") for loop in loops) <= spilled, compiled
    assert compiled.shared <= SHARED[compiled.target] * 1024, compiled


@pytest.mark.parametrize(
    "target, name, dim, page_size, rest",
    [
        ("sm_80", None, 64, 16, {}),
        ("sm_90", None, 128, 16, {}),
        ("sm_90", None, 128, 64, {"packed": True}),
        ("sm_90", None, 128, 64, {"tiles": 1}),
        ("sm_80", None, 128, 64, {"tiles": 1, "options": True}),
        ("sm_100", None, 128, 64, {}),
        ("gfx942", None, 128, 16, {}),
        ("sm_90", None, 192, 16, {"value_dim": 128}),
        ("sm_80", None, 256, 64, {}),
        ("sm_80", "int8", 128, 64, {}),
        ("sm_90", "fp8", 128, 16, {}),
        ("sm_90", "int4", 128, 64, {}),
        ("gfx942", "int4", 128, 64, {"options": True}),
        ("sm_100", "int2", 128, 64, {}),
    ],
)
def test_decode(target, name, dim, page_size, rest):
    compiled = build(target, name, dim, page_size, **rest)
    check(compiled, SPILLED.get(name, 0))
    # 16 rows are too few for the matrix instructions of warp groups: mma.sync on every NVIDIA GPU
    assert compiled.count("v_mfma" if target == "gfx942" else "HMMA") > 0
    if target != "gfx942":
        if name is None:  # copies that go past the registers
            assert prefetched(compiled) == {16}, "keys and values are not prefetched in wide loads"
        elif name != "int2":  # 2 words of a key for a thread
            assert compiled.count("LDG.E.128") >= 6, "codes are not loaded 16 bytes at a time"
        assert compiled.count("CCTL.IVALL") > 0, "arriving does not acquire: parts may be read from a stale L1 cache"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_operands_of_codes_change_neither_lanes_nor_memory(name):
    """In the loop over pages nothing goes through shared memory. Weights change lanes between the two products, by
    movmatrix, and the largest score of a warp is found by exchanges."""
    loop = max(sass.loops(build("sm_90", name, 128, 64).machine_code), key=lambda names: sass.count(names, "HMMA"))
    assert sass.count(loop, "LDS", "STS", "BAR", "I2F") == 0
    assert sass.count(loop, "SHFL") <= 6 and sass.count(loop, "MOVM") > 0


def prefetched(compiled):
    """Bytes of the asynchronous copies of 16-bit numbers and codes (parts are float32)."""
    copies = re.findall(r"async_copy_global_to_local.*contiguity = (\d+).*!tt\.ptr<(bf16|i8)>", compiled.asm["ttgir"])
    return {int(count) * (2 if kind == "bf16" else 1) for count, kind in copies}


def test_every_option_and_float32_build():
    compiled = build("sm_90", None, 80, 16, rows=8, dtype="fp32", options=True)
    assert compiled.shared <= SHARED["sm_90"] * 1024
