"""The kernels on caches compiled for four GPUs: they build, do not spill and move 16 bytes at a time."""

import aot
import pytest

from hf_efficient.kernels.flash_paged import cache_copy, cache_gather, cache_quantize, cache_write, rotary


LOAD = {"nvidia": ("LDG.E.128", "LDG.E.LTC128B.128"), "amd": ("global_load_dwordx4", "buffer_load_dwordx4")}
STORE = {"nvidia": ("STG.E.128",), "amd": ("global_store_dwordx4", "buffer_store_dwordx4")}


def build(kernel, target, pointers, constexprs):
    """With the types the launcher gives: pointers by name (absent ones are constexprs None), the rest int32."""
    signature = {name: "i32" for name in kernel.arg_names if name not in constexprs} | pointers
    aligned = tuple(name for name in signature if name.startswith("stride_") and name != "stride_table")
    compiled = aot.compile_kernel(kernel, signature, constexprs, target, num_warps=4, aligned=aligned)
    assert compiled.local_bytes == 0, compiled
    return compiled


def wide(compiled, which):
    maker = "amd" if compiled.target == "gfx942" else "nvidia"
    return sum(compiled.count(instruction) for instruction in which[maker])


@pytest.mark.parametrize("target", aot.TARGETS)
def test_write_quantized(target):
    is_float = target != "sm_90"
    pointers = {"x": "*bf16", "cache": "*u8" if is_float else "*i8", "scale": "*fp16", "slot_mapping": "*i64"}
    constexprs = {"cache_seqlens": None, "block_table": None}
    constexprs |= {"IS_FLOAT": is_float, "DIM": 128, "BLOCK_H": 16, "BLOCK_DIM": 128}
    assert wide(build(cache_write.write_quantized_kernel, target, pointers, constexprs), LOAD)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_write_and_copy(target):
    pointers = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16")
    pointers |= {"cache_seqlens": "*i32", "block_table": "*i32"}
    constexprs = {"slot_mapping": None, "HEAD_DIM": 128, "VALUE_DIM": 128}
    constexprs |= {"BLOCK_H": 16, "BLOCK_D": 128, "BLOCK_DV": 128}
    compiled = build(cache_write.write_kernel, target, pointers, constexprs)
    assert wide(compiled, LOAD) >= 2 and wide(compiled, STORE) >= 2, "keys and values"
    constexprs = {"SUBROWS": 1, "COLUMNS": 16 * 8 * 128, "SIZE": 16 * 8 * 128, "TILE": 4096}
    compiled = build(cache_copy.copy_kernel, target, {"cache": "*bf16", "mapping": "*i64"}, constexprs)
    assert wide(compiled, LOAD) and wide(compiled, STORE)


@pytest.mark.parametrize("target, bits", [("sm_80", 4), ("sm_90", 2), ("sm_100", 4), ("gfx942", 4)])
def test_quantize_groups(target, bits):
    tokens, width = 128, 128 * bits // 8
    pointers = {"cache": "*u8", "scale": "*fp16", "low": "*fp16", "group_mapping": "*i64"}
    sizes = {"BITS": bits, "TOKENS": tokens, "WIDTH": width}
    block_t, block_w = cache_quantize.tiles(tokens, width, width)
    keys = {**sizes, "CLIP": cache_quantize.KEY_CLIP[bits], "BLOCK_T": 128, "BLOCK_W": block_w}
    assert wide(build(cache_quantize.quantize_keys_kernel, target, {"k": "*bf16", **pointers}, keys), LOAD)
    values = {**sizes, "CHANNEL_GROUPS": 1, "BLOCK_T": block_t, "BLOCK_W": width}
    assert wide(build(cache_quantize.quantize_values_kernel, target, {"v": "*bf16", **pointers}, values), LOAD)


@pytest.mark.parametrize("target, bits", [("sm_80", 8), ("sm_90", 4), ("sm_100", 2), ("gfx942", 4)])
def test_gather(target, bits):
    pointers = {"cache": "*u8", "scale": "*fp16", "low": "*fp16", "tail": "*bf16", "out": "*bf16"}
    pointers |= dict.fromkeys(("block_table", "cu_seqlens", "quantized_seqlens"), "*i32")
    constexprs = {"cache_seqlens": None, "BITS": bits, "IS_FLOAT": bits == 8, "KEYS": True, "GROUP": 32}
    constexprs |= {"DIM": 128, "BLOCK_T": 32, "BLOCK_W": 128 * bits // 8}
    if bits == 8:
        del pointers["low"], pointers["tail"], pointers["quantized_seqlens"]
        constexprs |= {"low": None, "tail": None, "quantized_seqlens": None}
    compiled = build(cache_gather.gather_kernel, target, pointers, constexprs)
    assert wide(compiled, STORE)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_rotate_and_write(target):
    pointers = dict.fromkeys(("q", "k", "v", "cos", "sin", "out", "k_cache", "v_cache"), "*bf16")
    pointers |= {"cache_seqlens": "*i32", "block_table": "*i32"}
    constexprs = {"HEAD_DIM": 128, "VALUE_DIM": 128, "BLOCK_H": 8, "BLOCK_D": 128, "BLOCK_DV": 128}
    compiled = build(rotary.rotate_and_write_kernel, target, pointers, constexprs)
    if target == "gfx942":  # 256 lanes of 8 bytes each; queries and values share a store
        assert compiled.count("global_load_dwordx2") >= 3 and compiled.count("global_store_dwordx2") >= 2
    else:
        assert wide(compiled, LOAD) >= 3 and wide(compiled, STORE) >= 3, "queries, keys and values"
