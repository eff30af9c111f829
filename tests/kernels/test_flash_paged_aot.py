"""The prefill kernels of flash_paged compiled for four GPUs with the tile sizes of the table: they build, spill
nothing, fit the shared memory and use the matrix instructions."""

import aot
import pytest
import torch

from hf_efficient.kernels.flash_paged import config, forward, tiles


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
KIND = {"sm_80": "sm_80", "sm_90": "sm_90", "sm_100": "sm_100", "gfx942": "amd", "sm_89": "sm_80"}
# KiB of shared memory a block; the sm_80 row of the table also serves sm_86, sm_89 and sm_120, which have 99
SHARED = {"sm_80": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}


UNALIGNED = ("stride_table", "stride_lb", "stride_lh", "stride_slopes")


def build(kernel, constexprs, pointers, target, tile, unaligned=UNALIGNED, registers=None):
    """Compiles with the types the launcher gives: pointers by name (None: absent), strides and lengths i32."""
    signature = {name: kind for name, kind in pointers.items() if kind is not None}
    constexprs = {**constexprs, **{name: None for name, kind in pointers.items() if kind is None}}
    for name in kernel.arg_names:
        if name not in signature and name not in constexprs:
            signature[name] = "fp32" if name in ("scale", "cap", "softmax_scale") else "i32"
    aligned = tuple(name for name in kernel.arg_names if name.startswith("stride_") and name not in unaligned)
    return aot.compile_kernel(
        kernel, signature, constexprs, target, tile.num_warps, tile.num_stages, aligned, registers
    )


def compile_forward(target, dim, value_dim=None, dtype="bf16", page_size=0, queries=999, options=False, packed=False):
    """`forward_kernel` as launched: causal, or with every option; on dense or packed keys (page_size 0) or pages."""
    value_dim = value_dim or dim
    tile = config.forward_config(DTYPES[dtype], max(dim, value_dim), queries, page_size, KIND[target])
    pointers = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}")
    pointers["sinks"] = pointers["slopes"] = "*fp32" if options else None
    pointers["lse"] = "*fp32" if options else None
    pointers["block_table"] = "*i32" if page_size else None
    pointers["cache_seqlens"] = "*i32" if page_size and not packed else None
    pointers["cu_seqlens_q"] = pointers["cu_seqlens_k"] = "*i32" if packed else None
    constexprs = {"GROUP": 4, "HEAD_DIM": dim, "VALUE_DIM": value_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    constexprs |= {"SEARCH": packed, "PAGE_SIZE": page_size, "HAS_LEFT": options, "HAS_RIGHT": True, "SOFTCAP": options}
    constexprs["BLOCK_D"], constexprs["REST_D"] = tiles.split_dim(dim)
    constexprs["BLOCK_DV"], constexprs["REST_DV"] = tiles.split_dim(value_dim)
    return build(forward.forward_kernel, constexprs, pointers, target, tile)


def check(compiled):
    assert compiled.local_bytes == 0, compiled
    assert compiled.shared <= SHARED[compiled.target] * 1024, compiled
    if compiled.target == "sm_90":
        assert compiled.count("HMMA") == 0, "half of the matrix throughput of Hopper"


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("dim", [64, 128])
def test_forward(dim, target):
    compiled = compile_forward(target, dim)
    check(compiled)
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0
    if target in ("sm_80", "sm_90"):
        assert compiled.count("LDGSTS") > 0, "keys are not prefetched"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dim, value_dim", [(192, 128), (256, 256)])
def test_wide_heads(dim, value_dim, target):
    check(compile_forward(target, dim, value_dim))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_pages_are_prefetched(target):
    compiled = compile_forward(target, 128, page_size=16, packed=True)
    check(compiled)
    assert compiled.count("LDGSTS") > 0, "keys are not prefetched"


@pytest.mark.parametrize("target, dim, dtype, page_size", [("sm_90", 80, "fp16", 16), ("sm_80", 64, "fp32", 0)])
def test_every_option(target, dim, dtype, page_size):
    check(compile_forward(target, dim, dtype=dtype, page_size=page_size, options=True))
