"""Attention of many queries on Hopper: `forward_kernel` for the plain case (dense or packed, causal or full, head dim
64 or 128), divided by Triton into a warp that loads, by the tensor memory accelerator (TMA), and two groups of warps
that compute, as FlashAttention-3 (https://arxiv.org/abs/2407.08608) does.

The keys that a whole tile of queries sees are computed here. Those at its edge come first, by `forward_kernel`, which
leaves their outcome in `out` and `lse`, where the online softmax goes on: Triton's pass (3.6, 3.7) takes one loop
without branches, so that with masks each step would pay for them.
"""

import torch
import triton
import triton.language as tl

from .config import Config, launch_device
from .forward_launch import lse_strides, pairs_a_section, token_strides
from .tiles import INTERPRETED, dot, program_tile, score_scales, softmax_weights


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "heads", "tiles", "pairs", "section"])
def hopper_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_ob,
    stride_ot, stride_oh, stride_lb, stride_lh,
    seqlen_q, seqlen_k, heads, tiles, pairs, section, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Arguments as of `forward_kernel`. Every tile reads and writes its rows of out and lse, also behind a sequence's
    last query, where nothing stands: an early return fails in Triton's pass."""
    tile, pair = program_tile(tl.program_id(0), tiles, pairs, section)
    head = pair % heads
    sequence = (pair // heads).to(tl.int64)
    first_q = 0
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + sequence)
        seqlen_q = tl.load(cu_seqlens_q + sequence + 1) - first_q
        first_q = tl.where(seqlen_q > 0, first_q, 0)  # an empty last sequence would begin behind the tensor
    first_k = 0
    if cu_seqlens_k is not None:
        first_k = tl.load(cu_seqlens_k + sequence)
        seqlen_k = tl.load(cu_seqlens_k + sequence + 1) - first_k
        first_k = tl.where(seqlen_k > 0, first_k, 0)
    first_m = tile * BLOCK_M

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
    valid = m < seqlen_q
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(tl.maximum(first_m + seqlen_k - seqlen_q + 1, 0), seqlen_k)
    end = tl.where(first_m < seqlen_q, end // BLOCK_N * BLOCK_N, 0)

    out += sequence * stride_ob + tl.cast(first_q + first_m, tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    out_rows = out + (tl.arange(0, BLOCK_M) * stride_ot)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    lse_rows = lse + sequence * stride_lb + head.to(tl.int64) * stride_lh + first_q + m
    query = q_tiles.load([first_m, 0])
    acc = tl.load(out_rows, mask=valid[:, None], other=0.0).to(tl.float32)
    maximum = tl.load(lse_rows, mask=valid, other=float("-inf")) * 1.4426950408889634
    total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    for start in tl.range(0, end, BLOCK_N, warp_specialize=True):
        s = dot(query, k_tiles.load([start, 0]).T)
        p, shrink, total, maximum = softmax_weights(s, total, maximum, scale, False)
        acc = dot(p.to(query.dtype), v_tiles.load([start, 0]), acc * shrink[:, None])

    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(lse_rows, (maximum + tl.log2(divisor)) * 0.6931471805599453, mask=valid)
    tl.store(out_rows, (acc / divisor[:, None]).to(query.dtype), mask=valid[:, None])


CONFIG = Config(128, 128, 4, 2)


def obstacle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int, window: tuple[int, int], plain: bool
) -> str | None:
    """Why `attend_hopper` cannot compute this, or None. plain: no softcap, sinks, ALiBi slopes, cache and pages, and no
    batch of which most tiles are empty."""
    if q.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(q.device)[0] != 9):
        return "the device is not of compute capability 9"
    if not plain:
        return "softcap, s_aux, alibi_slopes, caches, pages and mixed batches are left to the portable kernel"
    if window not in ((-1, -1), (-1, 0)):
        return f"the window is {window}: only causal and full attention"
    if max_seqlen_q <= CONFIG.block_m // 2:
        return f"{max_seqlen_q} queries: only more than {CONFIG.block_m // 2}"
    if q.dtype == torch.float32 or q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
        return f"{q.dtype} with head dims {q.shape[-1]} and {v.shape[-1]}: only 16-bit dtypes with 64 or 128 for both"
    for tensor in (q, k, v):
        if tensor.data_ptr() % 16 or any(stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]):
            return "TMA needs addresses and strides that are multiples of 16 bytes"
    return None


def attend_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, max_seqlen_q: int, *,
    softmax_scale: float, causal: bool, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
) -> None:  # fmt: skip
    """Launches `hopper_kernel` for tensors without an `obstacle`, shaped as in forward.attend. out and lse hold the
    attention to the keys at the edges, and then that to all."""
    head_dim, heads, kv_heads = q.shape[-1], q.shape[-2], k.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    tiles = triton.cdiv(max_seqlen_q, CONFIG.block_m)
    if not INTERPRETED:
        triton.set_allocator(_scratch)
    with launch_device(q):
        hopper_kernel[(tiles * heads * batch,)](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
            *token_strides(q), *token_strides(k), *token_strides(v), *token_strides(out), *lse_strides(lse),
            max_seqlen_q, k.shape[-3], heads, tiles, batch * heads,
            pairs_a_section(q, k, v, batch, k.shape[-3]) if causal else 1, score_scales(softmax_scale, 0.0)[0],
            GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_M=CONFIG.block_m, BLOCK_N=CONFIG.block_n, CAUSAL=causal,
            num_warps=CONFIG.num_warps, num_stages=CONFIG.num_stages,
        )  # fmt: skip


def _scratch(size: int, alignment: int, stream) -> torch.Tensor:
    """Where the descriptors made on the device lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
