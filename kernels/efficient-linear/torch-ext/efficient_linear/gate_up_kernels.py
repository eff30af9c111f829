"""Two products of the same tokens, gated: both weights' tiles in one program."""

import triton
import triton.language as tl

from .split_k import arrive, sum_of_parts
from .weight_only_kernels import accumulate


@triton.jit
def gate_and_store(out_ptr, bias_gate_ptr, bias_up_ptr, gate, up, rows, tokens, M, N, HAS_BIAS: tl.constexpr):
    """silu(gate + its bias) * (up + its bias), [BLOCK_N, BLOCK_M] float32 -> out [M, N]."""
    if HAS_BIAS:
        gate += tl.load(bias_gate_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_up_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    result = gate * tl.sigmoid(gate) * up
    out_at = out_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None] & (tokens < M)[None, :])


@triton.jit
def store_gate_up(
    gate, up, out_ptr, bias_gate_ptr, bias_up_ptr, partial_ptr, arrivals_ptr, row_block, token_block, split, M, N,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """gate and up, float32 [BLOCK_N, BLOCK_M], gated -> out [M, N], where K is SPLIT by whoever arrives last (see
    few_tokens_kernel); partial is float32 [splits, 2, M, N]."""
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if SPLIT:
        inside = (rows < N)[:, None] & (tokens < M)[None, :]
        gate_at = partial_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
        up_at = gate_at + tl.cast(M, tl.int64) * N
        part_stride = tl.cast(M, tl.int64) * N * 2
        tl.store(gate_at + split * part_stride, gate, mask=inside)
        arrivals_at = arrivals_ptr + row_block * tl.num_programs(1) + token_block
        if arrive(up, up_at, part_stride, inside, arrivals_at, split, tl.num_programs(2)):
            gate = sum_of_parts(gate_at, part_stride, inside, tl.num_programs(2), BLOCK_N, BLOCK_M)
            up = sum_of_parts(up_at, part_stride, inside, tl.num_programs(2), BLOCK_N, BLOCK_M)
            gate_and_store(out_ptr, bias_gate_ptr, bias_up_ptr, gate, up, rows, tokens, M, N, HAS_BIAS)
    else:
        gate_and_store(out_ptr, bias_gate_ptr, bias_up_ptr, gate, up, rows, tokens, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["magic", "M", "steps_per_split"])
def gate_up_kernel(
    x_ptr, packed_gate_ptr, scale_gate_ptr, zero_gate_ptr, bias_gate_ptr, packed_up_ptr, scale_up_ptr, zero_up_ptr,
    bias_up_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x, stride_sgn, stride_sgg, stride_zgn, stride_zgg,
    stride_sun, stride_sug, stride_zun, stride_zug, steps_per_split, magic, BITS: tl.constexpr, GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, QUADS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr, WARPS: tl.constexpr,
    EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Grid and partial sums as in few_tokens_kernel; partial is float32 [splits, 2, M, N]."""
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_step = split * steps_per_split
    gate = accumulate(
        x_ptr, packed_gate_ptr, scale_gate_ptr, zero_gate_ptr, row_block, token_block, first_step,
        first_step + steps_per_split, M, N, K, stride_x, stride_sgn, stride_sgg, stride_zgn, stride_zgg, magic, BITS,
        GROUP, ASYMMETRIC, EVEN_K, BLOCK_N, BLOCK_M, UPCAST, PTX=PTX, QUADS=QUADS,
        WARPS=WARPS, EXCHANGE=EXCHANGE,
    )  # fmt: skip
    up = accumulate(
        x_ptr, packed_up_ptr, scale_up_ptr, zero_up_ptr, row_block, token_block, first_step,
        first_step + steps_per_split, M, N, K, stride_x, stride_sun, stride_sug, stride_zun, stride_zug, magic, BITS,
        GROUP, ASYMMETRIC, EVEN_K, BLOCK_N, BLOCK_M, UPCAST, PTX=PTX, QUADS=QUADS,
        WARPS=WARPS, EXCHANGE=EXCHANGE,
    )  # fmt: skip
    store_gate_up(
        gate, up, out_ptr, bias_gate_ptr, bias_up_ptr, partial_ptr, arrivals_ptr, row_block, token_block, split, M, N,
        HAS_BIAS, SPLIT, BLOCK_N, BLOCK_M,
    )  # fmt: skip
