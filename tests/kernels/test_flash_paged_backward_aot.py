"""The backward kernels of flash_paged compiled for four GPUs: they build, spill nothing, fit the shared memory and use
the matrix instructions."""

from dataclasses import replace

import aot
import pytest
from test_flash_paged_aot import DTYPES, KIND, MATRIX_INSTRUCTION, SHARED, UNALIGNED, build, check

from hf_efficient.kernels.flash_paged import backward, config


OF_QUERIES, OF_KEYS = ("grad_q", "sinks", "grad_sinks"), ("grad_k", "grad_v")


def compile_backward(kernel, target, dim, dtype="bf16", options=False, packed=False):
    """As launched: causal, or with every option."""
    tile = config.backward_config(DTYPES[dtype], dim, KIND[target])[kernel is backward.keys_kernel]
    own = OF_QUERIES if kernel is backward.queries_kernel else OF_KEYS
    pointers = dict.fromkeys(("q", "k", "v", "grad_out", *own), f"*{dtype}")
    pointers |= dict.fromkeys(("lse", "delta"), "*fp32")
    if kernel is backward.queries_kernel:
        pointers["sinks"] = pointers["grad_sinks"] = "*fp32" if options else None
    pointers["slopes"] = "*fp32" if options else None
    pointers["cu_seqlens_q"] = pointers["cu_seqlens_k"] = "*i32" if packed else None
    constexprs = {"GROUP": 4, "HEAD_DIM": dim, "VALUE_DIM": dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    constexprs |= {"BLOCK_D": dim, "BLOCK_DV": dim, "HAS_LEFT": options, "HAS_RIGHT": True, "SOFTCAP": options}
    return build(kernel, constexprs, pointers, target, tile)


CASES = [("sm_80", 64, "fp32"), ("sm_80", 128, "fp32"), ("sm_90", 256, "bf16"), ("gfx942", 256, "bf16")]
CASES += [("gfx942", 128, "fp32"), ("sm_100", 128, "bf16"), ("sm_80", 256, "fp32"), ("gfx942", 64, "bf16")]
KERNELS = {"queries": backward.queries_kernel, "keys": backward.keys_kernel}


@pytest.mark.parametrize("target, dim", [*((target, 128) for target in aot.TARGETS), ("sm_90", 64), ("gfx942", 64)])
@pytest.mark.parametrize("name", KERNELS)
def test_causal(name, dim, target):
    compiled = compile_backward(KERNELS[name], target, dim)
    check(compiled)
    assert compiled.count(MATRIX_INSTRUCTION[target]) > 0


@pytest.mark.parametrize("target, dim, dtype", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_every_option(name, target, dim, dtype):
    """Without HGMMA at 256 channels: tiles of the 64 rows that it multiplies spill there."""
    compiled = compile_backward(KERNELS[name], target, dim, dtype, options=True, packed=True)
    assert compiled.local_bytes == 0 and compiled.shared <= SHARED[target] * 1024, compiled


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_what_outputs_and_their_gradients_give(target):
    tile = replace(config.backward_config(DTYPES["bf16"], 128, KIND[target])[0], num_warps=4)
    pointers = {"out": "*bf16", "grad_out": "*bf16", "grad_lse": "*fp32", "delta": "*fp32", "cu_seqlens_q": "*i32"}
    constexprs = {"VALUE_DIM": 128, "BLOCK_M": tile.block_m, "BLOCK_DV": 128}
    check(build(backward.delta_kernel, constexprs, pointers, target, tile, (*UNALIGNED, "stride_db", "stride_dh")))
