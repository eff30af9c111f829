"""The decode kernels compiled for four GPUs: no spills, shared memory that fits, matrix instructions, wide loads."""

import re

import pytest
from test_flash_paged_aot import DTYPES, SHARED
from test_flash_paged_aot import build as compile_launched

from hf_efficient.kernels.flash_paged import config, decode, decode_grouped


BITS = {None: 16, "int8": 8, "fp8": 8, "int4": 4, "int2": 2}
OPTIONAL = {"lse": "*fp32", "sinks": "*fp32", "slopes": "*fp32", "tree_mask": "*i64"}


def power_of_two(dim):
    return max(16, 1 << (dim - 1).bit_length())


def build(target, name, dim, page_size, value_dim=None, rows=4, dtype="bf16", options=False):
    """As `attend_few` launches it: one query of `rows` heads that share a key head, keys of format `name` in pages,
    groups of 64 tokens; `options`: a token tree and every option."""
    value_dim, bits = value_dim or dim, BITS[name]
    backend = "amd" if target == "gfx942" else "nvidia"
    tile = config.decode_config(DTYPES[dtype], max(dim, value_dim), rows, backend, bits)
    parts = 8 // bits if bits < 8 else 1
    block_d, block_dv = power_of_two(dim // parts), power_of_two(value_dim // parts)
    real_rows = min(tile.block_m, 1 << (rows - 1).bit_length())
    constexprs = {"GROUP": rows, "HEAD_DIM": dim, "VALUE_DIM": value_dim, "PAGE_SIZE": page_size, "BLOCK_B": 32}
    constexprs |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": block_d, "BLOCK_DV": block_dv}
    constexprs |= {"ROWS": real_rows, "STEP": decode.parts_at_once(real_rows, parts * block_dv)}
    constexprs |= {"HAS_LEFT": options, "HAS_RIGHT": True, "SOFTCAP": options}
    pointers = dict.fromkeys(("q", "out"), f"*{dtype}") | dict.fromkeys(("partial", "statistics"), "*fp32")
    pointers |= dict.fromkeys(("arrivals", "cache_seqlens", "block_table"), "*i32")
    pointers |= OPTIONAL if options else dict.fromkeys(OPTIONAL)
    pointers |= dict.fromkeys(("k", "v"), f"*{dtype}" if name is None else "*i8" if bits == 8 else "*u8")
    kernel = decode_grouped.decode_grouped_kernel if bits < 8 else decode.decode_kernel
    scales = dict.fromkeys(("k_scale", "v_scale"), None if name is None else "*fp16")
    if bits < 8:
        scales |= dict.fromkeys(("k_min", "v_min"), "*fp16") | dict.fromkeys(("k_tail", "v_tail"), f"*{dtype}")
        scales["quantized_seqlens"] = "*i32"
        constexprs |= {"BITS": bits, "TOKENS": 64, "CHANNEL_GROUPS": 1, "RING": 128}
    else:
        constexprs["IS_FLOAT"] = name == "fp8"
    unaligned = [f"stride_{name}" for name in ("table", "slopes", "sb", "st", "sh", "vsb", "vst", "vsh")]
    return compile_launched(kernel, constexprs, {**pointers, **scales}, target, tile, unaligned)


def check(compiled):
    if compiled.target == "gfx942":
        # Scalar registers are spilled into lanes of vector registers (many strides), which costs no memory traffic.
        memory = (".vgpr_spill_count", ".private_segment_fixed_size")
        assert all(re.findall(rf"{re.escape(key)}:\s*(\d+)", compiled.asm["amdgcn"]) == ["0"] for key in memory)
    else:
        assert compiled.local_bytes == 0, compiled
    assert compiled.shared <= SHARED[compiled.target] * 1024, compiled


@pytest.mark.parametrize(
    "target, name, dim, page_size, rest",
    [
        ("sm_80", None, 64, 16, {}),
        ("sm_90", None, 128, 16, {}),
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
    check(compiled)
    # 16 rows are too few for the matrix instructions of warp groups: mma.sync on every NVIDIA GPU
    assert compiled.count("v_mfma" if target == "gfx942" else "HMMA") > 0
    if target != "gfx942":  # where copies go through registers
        bytes_at_once = {8, 16} if name == "int2" else {16}  # a tile of int2 codes has 8 bytes a thread
        assert prefetched(compiled) == bytes_at_once, "keys and values are not prefetched in wide loads"
        assert compiled.count("CCTL.IVALL") > 0, "arriving does not acquire: parts may be read from a stale L1 cache"


def prefetched(compiled):
    """Bytes of the asynchronous copies of 16-bit numbers and codes (parts are float32)."""
    copies = re.findall(r"async_copy_global_to_local.*contiguity = (\d+).*!tt\.ptr<(bf16|i8)>", compiled.asm["ttgir"])
    return {int(count) * (2 if kind == "bf16" else 1) for count, kind in copies}


def test_every_option_and_float32_build():
    compiled = build("sm_90", None, 80, 16, rows=8, dtype="fp32", options=True)
    assert compiled.shared <= SHARED["sm_90"] * 1024
