"""Several products with the same tokens in one launch: which weight a program multiplies, and the products with dense
weights [N, K].

Weights are the wide operand, as in weight_only_kernels. A dense product of few tokens reads each weight once; torch's
own would be one launch a weight.
"""

import triton
import triton.language as tl

from .gate_up_kernels import store_gate_up
from .split_k import arrive, sum_of_parts
from .weight_only_kernels import accumulate


@triton.jit
def weight_of_program(row_block, N0, N1, COUNT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Among the row blocks of COUNT weights of N0, N1, ... rows, one after the other: the number of the weight that
    block `row_block` belongs to, the block's number in it, and the rows of the weights before it."""
    which = 0
    before = 0
    blocks = tl.cdiv(N0, BLOCK_N)
    if row_block >= blocks:
        which = 1
        before += N0
        row_block -= blocks
        if COUNT == 3:
            blocks = tl.cdiv(N1, BLOCK_N)
            if row_block >= blocks:
                which = 2
                before += N1
                row_block -= blocks
    return which, row_block, before


@triton.jit
def choose(which, a, b, c, COUNT: tl.constexpr):
    """One of COUNT (2 or 3) pointers or numbers of one type."""
    chosen = a
    if which == 1:
        chosen = b
    if COUNT == 3:
        if which == 2:
            chosen = c
    return chosen


@triton.jit
def store_part_of_rows(
    result, out_ptr, bias_ptr, partial_ptr, arrivals_ptr, row_block, token_block, before, M, N, ALL_N,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """result [BLOCK_N, BLOCK_M] (+ bias [N]) -> out [M, N], where K is SPLIT by whoever arrives last (see
    few_tokens_kernel); partial is float32 [splits, M, ALL_N], a weight's rows from `before` on."""
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < N)[:, None] & (tokens < M)[None, :]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None]
    if SPLIT:
        partial_at = partial_ptr + tokens.to(tl.int64)[None, :] * ALL_N + (before + rows)[:, None]
        part_stride = tl.cast(M, tl.int64) * ALL_N
        arrivals_at = arrivals_ptr + tl.program_id(0) * tl.num_programs(1) + token_block
        if arrive(result, partial_at, part_stride, inside, arrivals_at, tl.program_id(2), tl.num_programs(2)):
            total = sum_of_parts(partial_at, part_stride, inside, tl.num_programs(2), BLOCK_N, BLOCK_M)
            tl.store(out_at, (total + bias).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_at, (result + bias).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["magic", "M", "N0", "N1", "N2", "steps_per_split"])
def joined_few_tokens_kernel(
    x_ptr, packed0, packed1, packed2, scale0, scale1, scale2, zero0, zero1, zero2, bias0, bias1, bias2, out0, out1,
    out2, partial_ptr, arrivals_ptr, M, N0, N1, N2, K, stride_x, stride_sn, stride_sg, stride_zn, stride_zg,
    steps_per_split, magic, COUNT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr, QUADS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr, WARPS: tl.constexpr,
    EXCHANGE: tl.constexpr,
):  # fmt: skip
    """`few_tokens_kernel` of COUNT weights alike in all but their rows; grid (their row blocks, token blocks, splits of
    K)."""
    token_block, split = tl.program_id(1), tl.program_id(2)
    which, row_block, before = weight_of_program(tl.program_id(0), N0, N1, COUNT, BLOCK_N)
    N = choose(which, N0, N1, N2, COUNT)
    zero_ptr = zero0
    if ASYMMETRIC:
        zero_ptr = choose(which, zero0, zero1, zero2, COUNT)
    bias_ptr = bias0
    if HAS_BIAS:
        bias_ptr = choose(which, bias0, bias1, bias2, COUNT)
    first_step = split * steps_per_split
    result = accumulate(
        x_ptr, choose(which, packed0, packed1, packed2, COUNT), choose(which, scale0, scale1, scale2, COUNT), zero_ptr,
        row_block, token_block, first_step, first_step + steps_per_split, M, N, K, stride_x, stride_sn, stride_sg,
        stride_zn, stride_zg, magic, BITS, GROUP, ASYMMETRIC, EVEN_K, BLOCK_N, BLOCK_M, UPCAST, PTX=PTX, QUADS=QUADS,
        WARPS=WARPS, EXCHANGE=EXCHANGE,
    )  # fmt: skip
    ALL_N = N0 + N1
    if COUNT == 3:
        ALL_N += N2
    store_part_of_rows(
        result, choose(which, out0, out1, out2, COUNT), bias_ptr, partial_ptr, arrivals_ptr, row_block, token_block,
        before, M, N, ALL_N, HAS_BIAS, SPLIT, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit
def load_dense(at, columns, K, EVEN_K: tl.constexpr, UPCAST: tl.constexpr, AXIS: tl.constexpr):
    """A tile of columns of a dense operand; columns lie along AXIS, those from K on are zero."""
    if EVEN_K:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=tl.expand_dims(columns < K, 1 - AXIS), other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit(do_not_specialize=["M", "N0", "N1", "N2", "steps_per_split"])
def joined_dense_kernel(
    x_ptr, weight0, weight1, weight2, bias0, bias1, bias2, out0, out1, out2, partial_ptr, arrivals_ptr, M, N0, N1, N2,
    K, stride_x, stride_w, steps_per_split, COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid and partial sums as `joined_few_tokens_kernel`."""
    token_block, split = tl.program_id(1), tl.program_id(2)
    which, row_block, before = weight_of_program(tl.program_id(0), N0, N1, COUNT, BLOCK_N)
    N = choose(which, N0, N1, N2, COUNT)
    bias_ptr = bias0
    if HAS_BIAS:
        bias_ptr = choose(which, bias0, bias1, bias2, COUNT)
    rows = tl.minimum(row_block * BLOCK_N + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    tokens = tl.minimum(token_block * BLOCK_M + tl.arange(0, BLOCK_M), M - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    weight_at = choose(which, weight0, weight1, weight2, COUNT) + (rows * stride_w)[:, None] + columns[None, :]
    result = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first_step = split * steps_per_split
    for step in tl.range(first_step, tl.minimum(first_step + steps_per_split, tl.cdiv(K, BLOCK_K))):
        first = step * BLOCK_K
        x = load_dense(x_at + first, first + columns, K, EVEN_K, UPCAST, 0)
        weight = load_dense(weight_at + first, first + columns, K, EVEN_K, UPCAST, 1)
        result = tl.dot(weight, x, result, input_precision="ieee")
    ALL_N = N0 + N1
    if COUNT == 3:
        ALL_N += N2
    store_part_of_rows(
        result, choose(which, out0, out1, out2, COUNT), bias_ptr, partial_ptr, arrivals_ptr, row_block, token_block,
        before, M, N, ALL_N, HAS_BIAS, SPLIT, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def gate_up_dense_kernel(
    x_ptr, gate_ptr, up_ptr, bias_gate_ptr, bias_up_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x,
    stride_w, steps_per_split, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """silu(x gate^T) * (x up^T); grid (row blocks, token blocks, splits of K), partial float32 [splits, 2, M, N]."""
    row_block, token_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (tl.minimum(tokens, M - 1).to(tl.int64) * stride_x)[None, :] + columns[:, None]
    offset = (tl.minimum(rows, N - 1).to(tl.int64) * stride_w)[:, None] + columns[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first_step = split * steps_per_split
    for step in tl.range(first_step, tl.minimum(first_step + steps_per_split, tl.cdiv(K, BLOCK_K))):
        first = step * BLOCK_K
        x = load_dense(x_at + first, first + columns, K, EVEN_K, UPCAST, 0)
        weight = load_dense(gate_ptr + offset + first, first + columns, K, EVEN_K, UPCAST, 1)
        gate = tl.dot(weight, x, gate, input_precision="ieee")
        weight = load_dense(up_ptr + offset + first, first + columns, K, EVEN_K, UPCAST, 1)
        up = tl.dot(weight, x, up, input_precision="ieee")
    store_gate_up(
        gate, up, out_ptr, bias_gate_ptr, bias_up_ptr, partial_ptr, arrivals_ptr, row_block, token_block, split, M, N,
        HAS_BIAS, SPLIT, BLOCK_N, BLOCK_M,
    )  # fmt: skip
