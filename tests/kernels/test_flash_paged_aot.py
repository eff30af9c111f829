"""The flash_paged kernels compiled for four GPUs: they build, do not spill and use the matrix instructions."""

import aot
import pytest
import torch

from hf_efficient.kernels.flash_paged import cache_write, config, forward


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}


def build(kernel, arguments, constexprs, pointers, target, tile):
    """Compiles with the types the launcher gives: pointers by name (None: absent), "stride_*" and lengths i32."""
    signature = {name: kind for name, kind in pointers.items() if kind is not None}
    constexprs = {**constexprs, **{name: None for name, kind in pointers.items() if kind is None}}
    for name in arguments:
        if name not in signature and name not in constexprs:
            signature[name] = "fp32" if name in ("scale", "cap") else "i32"
    aligned = tuple(name for name in arguments if name.startswith("stride_") and name != "stride_table")
    return aot.compile_kernel(kernel, signature, constexprs, target, tile.num_warps, tile.num_stages, aligned)


def attention(target, kernel, dim, dtype="bf16", page_size=0, rows=999, options=False, packed=False):
    """The forward kernel as launched for head dim `dim`: causal, or with every option; on dense or packed keys (page_size 0)
    or pages."""
    tile = config.forward_config(DTYPES[dtype], dim, rows, "amd" if target == "gfx942" else "nvidia")
    pointers = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}")
    pointers["sinks"] = "*fp32" if options else None
    pointers["block_table"] = "*i32" if page_size else None
    pointers["cache_seqlens"] = "*i32" if page_size and not packed else None
    constexprs = {
        "GROUP": 4,
        "HEAD_DIM": dim,
        "VALUE_DIM": dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": 1 << (dim - 1).bit_length(),
        "BLOCK_DV": 1 << (dim - 1).bit_length(),
        "PAGE_SIZE": page_size,
        "HAS_LEFT": options,
        "HAS_RIGHT": True,
        "SOFTCAP": options,
    }
    pointers["cu_seqlens_q"] = pointers["cu_seqlens_k"] = "*i32" if packed else None
    return build(kernel, kernel.arg_names, constexprs, pointers, target, tile)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page_size", [0, 16])
def test_forward(page_size, dim, target):
    compiled = attention(target, forward.forward_kernel, dim, page_size=page_size, packed=page_size > 0)
    assert compiled.local_bytes == 0, compiled
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0
    assert compiled.shared <= (64 if target == "gfx942" else 160) * 1024
    if target == "sm_90":
        assert compiled.count("HMMA") == 0, "half of the matrix throughput of Hopper"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dim, dtype", [(64, "fp16"), (80, "bf16"), (192, "bf16"), (32, "fp32")])
def test_options_and_other_head_dims_build(dim, dtype, target):
    compiled = attention(target, forward.forward_kernel, dim, dtype, page_size=16, options=True)
    assert compiled.shared <= (64 if target == "gfx942" else 160) * 1024


@pytest.mark.parametrize("target", aot.TARGETS)
def test_writing_builds(target):
    tile = config.Config(0, 0, 4, 3)
    pointers = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16")
    constexprs = {"HEAD_DIM": 128, "VALUE_DIM": 128, "BLOCK_H": 8, "BLOCK_D": 128, "BLOCK_DV": 128}
    arguments = cache_write.write_kernel.arg_names
    for given in ({"slot_mapping": "*i64"}, {"cache_seqlens": "*i32", "block_table": "*i32"}):
        absent = dict.fromkeys({"slot_mapping", "cache_seqlens", "block_table"} - set(given))
        compiled = build(
            cache_write.write_kernel, arguments, constexprs, {**pointers, **given, **absent}, target, tile
        )
        assert compiled.local_bytes == 0
