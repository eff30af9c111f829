"""Attention of many queries on Hopper: `forward_kernel` for the plain case (dense or packed, causal or full, head dim
64 or 128), with keys and values fetched by the tensor memory accelerator (TMA) through descriptors made on the device.

Two ways to run it: "tma" pipelines the loads in one group of warps; "warp_specialized" has Triton divide the program
into a warp that loads and two groups of warps that compute, as FlashAttention-3 (https://arxiv.org/abs/2407.08608)
does. No GPU could measure them here: config.py chooses the portable kernel, and benchmarks ask for the others by name
(`attend(variant=...)`).
"""

import torch
import triton
import triton.language as tl

from .config import Config, launch_device
from .forward_launch import lse_strides, pairs_a_section, token_strides
from .tiles import INTERPRETED, dot, program_tile, score_scales, softmax_weights


@triton.jit
def _mask(s, start, high, BLOCK_N: tl.constexpr):
    return tl.where((start + tl.arange(0, BLOCK_N))[None, :] < high[:, None], s, float("-inf"))


@triton.jit
def _walk(
    q, k_tiles, v_tiles, acc, total, maximum, end, outer, high, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """The keys 0..end in steps of BLOCK_N; from `outer` on row r sees only keys below high[r]."""
    for start in tl.range(0, end, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        s = dot(q, k_tiles.load([start, 0]).T)
        if WARP_SPECIALIZE:
            if MASKED:
                s = _mask(s, start, high, BLOCK_N)
        elif start >= outer:
            s = _mask(s, start, high, BLOCK_N)
        p, shrink, total, maximum = softmax_weights(s, total, maximum, scale, False)
        acc = dot(p.to(q.dtype), v_tiles.load([start, 0]), acc * shrink[:, None])
    return acc, total, maximum


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "heads", "tiles", "pairs", "section"])
def hopper_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_ob,
    stride_ot, stride_oh, stride_lb, stride_lh,
    seqlen_q, seqlen_k, heads, tiles, pairs, section, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Arguments as of `forward_kernel`. WARP_SPECIALIZE: Triton's pass (3.7.1) fails on an early return and on a second
    loop and does nothing when the loop contains a branch, so all blocks are masked or (not MASKED: every key is seen)
    none."""
    tile, pair = program_tile(tl.program_id(0), tiles, pairs, section)
    head = pair % heads
    sequence = (pair // heads).to(tl.int64)
    first_q = 0
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + sequence)
        seqlen_q = tl.load(cu_seqlens_q + sequence + 1) - first_q
    first_k = 0
    if cu_seqlens_k is not None:
        first_k = tl.load(cu_seqlens_k + sequence)
        seqlen_k = tl.load(cu_seqlens_k + sequence + 1) - first_k
    first_m = tile * BLOCK_M
    if not WARP_SPECIALIZE:
        if first_m >= seqlen_q:
            return

    kv_head = (head // GROUP).to(tl.int64)
    q += sequence * stride_qb + tl.cast(first_q, tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    k += sequence * stride_kb + tl.cast(first_k, tl.int64) * stride_kt + kv_head * stride_kh
    v += sequence * stride_vb + tl.cast(first_k, tl.int64) * stride_vt + kv_head * stride_vh
    # a descriptor of no rows would be one of 2**32: it has at least one, which is then not loaded or not stored
    keys = tl.maximum(seqlen_k, 1)
    q_tiles = tl.make_tensor_descriptor(q, [tl.maximum(seqlen_q, 1), HEAD_DIM], [stride_qt, 1], [BLOCK_M, HEAD_DIM])
    k_tiles = tl.make_tensor_descriptor(k, [keys, HEAD_DIM], [stride_kt, 1], [BLOCK_N, HEAD_DIM])
    v_tiles = tl.make_tensor_descriptor(v, [keys, HEAD_DIM], [stride_vt, 1], [BLOCK_N, HEAD_DIM])

    m = first_m + tl.arange(0, BLOCK_M)
    shift = seqlen_k - seqlen_q
    high = tl.zeros([BLOCK_M], tl.int32) + seqlen_k
    end = seqlen_k
    outer = seqlen_k
    if CAUSAL:
        high = tl.minimum(m + shift + 1, seqlen_k)
        end = tl.minimum(tl.minimum(first_m + BLOCK_M, seqlen_q) + shift, seqlen_k)
        outer = tl.minimum(tl.maximum(first_m + shift + 1, 0), seqlen_k)
    end = tl.where(first_m < seqlen_q, end, 0)
    outer = outer // BLOCK_N * BLOCK_N

    query = q_tiles.load([first_m, 0])
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    acc, total, maximum = _walk(
        query, k_tiles, v_tiles, acc, total, maximum, end, outer, high, scale, BLOCK_N, MASKED, WARP_SPECIALIZE
    )

    divisor = tl.where(total == 0.0, 1.0, total)
    valid = m < seqlen_q
    if lse is not None:
        lse += sequence * stride_lb + head.to(tl.int64) * stride_lh + first_q
        tl.store(lse + m, (maximum + tl.log2(divisor)) * 0.6931471805599453, mask=valid)
    out += sequence * stride_ob + tl.cast(first_q + first_m, tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    pointers = out + (tl.arange(0, BLOCK_M) * stride_ot)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(pointers, (acc / divisor[:, None]).to(query.dtype), mask=valid[:, None])


CONFIGS = {"tma": Config(128, 128, 8, 2), "warp_specialized": Config(128, 128, 4, 2)}
VARIANTS = tuple(CONFIGS)


def obstacle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: tuple[int, int], plain: bool) -> str | None:
    """Why `attend_hopper` cannot compute this, or None. plain: no softcap, sinks, ALiBi slopes, cache and pages."""
    if q.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(q.device)[0] != 9):
        return "the device is not of compute capability 9"
    if not plain:
        return "softcap, s_aux, alibi_slopes, caches and pages are left to the portable kernel"
    if window not in ((-1, -1), (-1, 0)):
        return f"the window is {window}: only causal and full attention"
    if q.dtype == torch.float32 or q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
        return f"{q.dtype} with head dims {q.shape[-1]} and {v.shape[-1]}: only 16-bit dtypes with 64 or 128 for both"
    for tensor in (q, k, v):
        if tensor.data_ptr() % 16 or any(stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]):
            return "TMA needs addresses and strides that are multiples of 16 bytes"
    return None


def attend_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, max_seqlen_q: int,
    *, variant: str, softmax_scale: float, causal: bool, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> None:  # fmt: skip
    """Launches `hopper_kernel` for tensors without an `obstacle`, shaped as in forward.attend; writes out and lse."""
    heads, kv_heads, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    config = CONFIGS[variant]
    tiles = triton.cdiv(max_seqlen_q, config.block_m)
    if not INTERPRETED:
        triton.set_allocator(_scratch)
    with launch_device(q):
        hopper_kernel[(tiles * heads * batch,)](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
            *token_strides(q), *token_strides(k), *token_strides(v), *token_strides(out), *lse_strides(lse),
            max_seqlen_q, k.shape[-3], heads, tiles, batch * heads,
            pairs_a_section(q, k, v, batch, k.shape[-3]) if causal else 1, score_scales(softmax_scale, 0.0)[0],
            GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CAUSAL=causal,
            MASKED=causal or cu_seqlens_k is not None or k.shape[-3] % config.block_n != 0,
            WARP_SPECIALIZE=variant == "warp_specialized", num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _scratch(size: int, alignment: int, stream) -> torch.Tensor:
    """Where the descriptors made on the device lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
