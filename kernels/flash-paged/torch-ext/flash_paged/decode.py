"""Attention of few queries over many keys, in one launch.

The query heads that share a key head are the rows of one matrix product, and the keys of a sequence are split over
programs (FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). decode_schedule.py says which program
reads which keys, decode_combine.py how partial results are added.

Results do not depend on the order in which programs run. Their last bits depend on the lengths of the other sequences
and on the number of processors, which decide where keys are split.
"""

import torch
import triton
import triton.language as tl

from .code_operands import MAGIC
from .config import codes_config, decode_config, launch_device, processors
from .decode_codes import decode_codes_kernel
from .decode_combine import arrival_counters, finish_lane
from .decode_schedule import MIN_KEYS, program_share, sequence_tiles
from .decode_scores import find_pages, locate, query_positions, visible_scores
from .forward_launch import most_are_empty, token_strides
from .kv_formats import QuantizedKV
from .tiles import INTERPRETED, dot, load_rows, score_scales, softmax_weights


@triton.jit(
    do_not_specialize=["batch", "seqlen_q", "seqlen_k", "appended", "left", "right", "tiles", "kv_heads", "tokens"]
)
def decode_kernel(
    q, k, v, out, lse, partial, statistics, arrivals, sinks, slopes, tree_mask, cache_seqlens, block_table,
    cu_seqlens_q,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_slopes,
    stride_table,
    batch, seqlen_q, seqlen_k, appended, kv_heads, tiles, scale, cap, left, right, tokens,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Decodes over keys and values in the dtype of q.

    A lane is one key head and one tile of rows; row i * GROUP + g is query i of head g of the group. tree_mask is
    contiguous [B, Sq]. The other pointers are those of `attend_few`, None where absent. With cu_seqlens_q a sequence
    has up to Sq queries, which are the last of its Sq rows: so their positions are those of its last keys.
    """
    TREE: tl.constexpr = tree_mask is not None
    lanes = kv_heads * tiles
    share, position, stop, first_lane, end_lane, sequence_start = program_share(
        batch, lanes, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N, BLOCK_B
    )
    for lane in tl.range(first_lane, end_lane):
        sequence = (lane // lanes).to(tl.int64)
        length, begin, lane_tiles = sequence_tiles(
            sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N
        )
        lane_start = sequence_start + lane % lanes * lane_tiles
        first = tl.maximum(position - lane_start, 0)
        last = tl.minimum(stop - lane_start, lane_tiles)
        kv_head = (lane % lanes // tiles).to(tl.int64)
        tile = lane % tiles
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = m < seqlen_q * GROUP
        query_index = m // GROUP
        head = kv_head * GROUP + m % GROUP
        token = query_index.to(tl.int64)
        if cu_seqlens_q is not None:
            token += tl.load(cu_seqlens_q + sequence + 1) - seqlen_q
            valid = valid & (token >= tl.load(cu_seqlens_q + sequence))
        query_rows = q + sequence * stride_qb + token * stride_qt + head * stride_qh
        query = load_rows(query_rows, valid, True, HEAD_DIM, BLOCK_D)

        shift = length - seqlen_q
        own_tree = tree_mask
        if TREE:
            own_tree = tree_mask + sequence * seqlen_q
        query_position, tree = query_positions(query_index, valid, shift, own_tree, TREE)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            slope = tl.load(slopes + sequence * stride_slopes + head, mask=valid, other=0.0) * 1.4426950408889634
        k_head = k + kv_head * stride_kh
        v_head = v + kv_head * stride_vh
        own_table = block_table
        if PAGE_SIZE > 0:
            own_table = block_table + sequence * stride_table

        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        first_key = (begin + first) * BLOCK_N
        last_key = tl.minimum((begin + last) * BLOCK_N, length)
        pages = find_pages(own_table, sequence, first_key, length, PAGE_SIZE, BLOCK_N)
        for start in tl.range(first_key, last_key, BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            page, slot, offset, present = locate(pages, start, length, PAGE_SIZE, BLOCK_N)
            pages = find_pages(own_table, sequence, start + BLOCK_N, length, PAGE_SIZE, BLOCK_N)
            key_rows = k_head + offset * stride_kt + page * stride_kb + slot * stride_kt
            value_rows = v_head + offset * stride_vt + page * stride_vb + slot * stride_vt
            keys = load_rows(key_rows, present, True, HEAD_DIM, BLOCK_D)
            values = load_rows(value_rows, present, True, VALUE_DIM, BLOCK_DV)
            s = dot(query, tl.trans(keys))
            s = visible_scores(
                s, (start + tl.arange(0, BLOCK_N))[None, :], present[None, :], query_position[:, None], tree[:, None],
                own_tree, slope[:, None], shift, seqlen_q, left, right, scale, cap, HAS_LEFT, HAS_RIGHT, TREE, SOFTCAP,
                slopes is not None,
            )  # fmt: skip
            p, shrink, total, maximum = softmax_weights(s, total, maximum, scale, True)
            acc = acc * shrink[:, None] + dot(p.to(v.dtype.element_ty), values)

        finish_lane(
            out, lse, sinks, partial, statistics, arrivals, acc, total, maximum, cu_seqlens_q, tokens, sequence,
            kv_head, tile, lane_start, lane_tiles, first, last, share, seqlen_q, kv_heads, tl.arange(0, BLOCK_DV),
            GROUP, VALUE_DIM, ROWS, STEP,
        )  # fmt: skip
        sequence_start += tl.where(lane % lanes == lanes - 1, lanes * lane_tiles, 0)


def is_decode(queries: int, group: int) -> bool:
    """Whether `attend_few` is faster than forward.attend for so many queries a sequence."""
    return queries <= 16 or queries * group <= 128


def is_packed_decode(queries: int, group: int) -> bool:
    """The same of packed sequences of at most so many queries: one tile has them, however few a sequence has."""
    return is_decode(queries, group) and queries * group <= 64


def few_beside_many(tokens: int, batch: int, max_seqlen_q: int, group: int) -> int:
    """Up to how many queries packed sequences are computed by `attend_few` beside longer ones: 0 where most are long,
    else as many as make a small tile."""
    tiles = triton.cdiv(max_seqlen_q, 128)
    return max(1, 16 // group) if group <= 64 and most_are_empty(tokens, batch, tiles, 128) else 0


def parts_at_once(rows: int, columns: int, programs: int = 4) -> int:
    """How many parts of a lane are added at once: as many as fit the registers beside the other values, and the shared
    memory of a multiprocessor that has so many programs."""
    room = 4096 if programs <= 6 else 2048 if programs <= 12 else 1024
    return max(1, min(32, room // (rows * columns)))


def attend_few(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, window: tuple[int, int], softcap: float,
    s_aux: torch.Tensor | None, alibi_slopes: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None, appended: int = 0, block_table: torch.Tensor | None = None,
    return_lse: bool = False, quantized: QuantizedKV | None = None, cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Launches a decode kernel on checked arguments.

    q is [B, Sq, Hq, D]; k and v are [B, Sk, Hk, D or Dv], or with block_table (int32 [B, max_blocks]) pages, of codes
    with `quantized`. A sequence has cache_seqlens (int32 [B], None: Sk) plus `appended` keys. window -1 is no limit.
    alibi_slopes float32 [Hq] or [B, Hq]. With tree_mask int64 [B, Sq] the right window is not used. With cu_seqlens_q
    int32 [B + 1] q is [T, Hq, D], packed sequences of at most max_seqlen_q queries, over pages that are not quantized;
    out is [T, Hq, Dv] and the other result [Hq, T].

    Returns out [B, Sq, Hq, Dv] in the dtype of q and, with return_lse, float32 [B, Hq, Sq], the natural logarithm of
    the softmax sums (sink included; -inf without keys and sink).

    Raises ValueError for more than 2**31 key tiles.
    """
    packed = cu_seqlens_q is not None
    heads, head_dim = q.shape[-2:]
    batch, queries = (len(cu_seqlens_q) - 1, max_seqlen_q) if packed else q.shape[:2]
    kv_heads, page_size = k.shape[2], k.shape[1]
    grouped = quantized is not None and quantized.bits < 8
    value_dim = quantized.v_tail.shape[3] if grouped else v.shape[3]
    out = torch.empty((*q.shape[:-1], value_dim), dtype=q.dtype, device=q.device)
    shape = (heads, len(q)) if packed else (batch, heads, queries)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() == 0 or batch == 0 or queries == 0:
        return out, lse
    group = heads // kv_heads
    paged = block_table is not None
    capacity = page_size * (block_table.shape[1] if paged else 1)
    rows, is_nvidia = queries * group, not INTERPRETED and not torch.version.hip
    if quantized is None:
        key_tiles = batch * kv_heads * triton.cdiv(capacity, 64) / processors(q.device)
        config = decode_config(q.dtype, max(head_dim, value_dim), rows, tiles=key_tiles)
        kernel = decode_kernel
        block_n, warps = config.block_n, config.num_warps
        block_dv = max(16, triton.next_power_of_2(value_dim))
        arrays, beside = (k, v), ()
        options = {"BLOCK_N": block_n, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "BLOCK_DV": block_dv}
        options |= {"num_stages": config.num_stages}
    else:
        tokens = page_size if quantized.bits == 8 else page_size // quantized.k_scale.shape[1]
        kernel, config = decode_codes_kernel, codes_config(max(head_dim, value_dim), rows, quantized.bits, tokens)
        warps, block_n = config.warps, config.keys * config.warps
        arrays, beside, options = _codes(k, v, head_dim, quantized)
        block_dv = options["VALUE_BYTES"] * 8 // quantized.bits
        options |= {"WARPS": warps, "KEYS": config.keys, "magic": MAGIC, "PTX": is_nvidia}
        # scales of several channel groups are loaded by the order of keys, which moving changes
        moves = config.move and q.dtype != torch.float32 and options["CHANNEL_GROUPS"] == 1
        options |= {"VALUES_AHEAD": config.values_ahead, "MOVE": moves}
        capacity += options["RING"]

    if is_nvidia and config.registers is not None:
        options["maxnreg"] = config.registers
    tiles = triton.cdiv(rows, config.block_m)
    if batch * kv_heads * tiles * triton.cdiv(capacity, block_n) >= 2**31:
        raise ValueError(
            f"{batch} sequences of {kv_heads} key heads and up to {capacity} keys are too many: allowed are 2**31 "
            f"tiles of {block_n} keys; give block_table fewer columns, or fewer sequences at once"
        )
    visited = min(capacity, window[0] + queries + 2 * block_n) if window[0] >= 0 else capacity
    work = batch * kv_heads * tiles * triton.cdiv(max(visited, 1), MIN_KEYS.value)
    programs = min(config.programs_per_processor * processors(q.device), work)
    real_rows = min(config.block_m, triton.next_power_of_2(rows))
    partial = torch.empty((2 * programs, real_rows, block_dv), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2 * programs, real_rows, 2), dtype=torch.float32, device=q.device)
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    with launch_device(q):
        kernel[(programs,)](
            q, *arrays, out, lse, partial, statistics, arrival_counters(programs, q.device), s_aux, slopes,
            None if tree_mask is None else tree_mask.contiguous(), cache_seqlens, block_table,
            *((cu_seqlens_q,) if quantized is None else ()), *token_strides(q), *arrays[0].stride()[:3],
            *arrays[1].stride()[:3], *(stride for tensor in beside for stride in tensor.stride()[:3]),
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0, block_table.stride(0) if paged else 0,
            batch, queries, capacity, appended, kv_heads, tiles, *score_scales(softmax_scale, softcap), *window,
            *((len(q),) if quantized is None else ()), GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
            BLOCK_M=config.block_m,
            BLOCK_B=min(1024, max(32, triton.next_power_of_2(batch))), ROWS=real_rows,
            STEP=parts_at_once(real_rows, block_dv, config.programs_per_processor), PAGE_SIZE=page_size if paged else 0,
            HAS_LEFT=window[0] >= 0, HAS_RIGHT=window[1] >= 0, SOFTCAP=softcap > 0, num_warps=warps, **options,
        )  # fmt: skip
    return out, lse


def _codes(k: torch.Tensor, v: torch.Tensor, head_dim: int, quantized: QuantizedKV) -> tuple[tuple, tuple, dict]:
    """The tensors, those with strides behind k's and v's, and the options of `decode_codes_kernel`."""
    scales = quantized.k_scale, quantized.k_min, quantized.v_scale, quantized.v_min
    if k.shape[0] == 0:  # a page to load from, whatever it holds
        k, v = (x.new_zeros((1, *x.shape[1:])) for x in (k, v))
        scales = tuple(None if x is None else x.new_zeros((1, *x.shape[1:])) for x in scales)
    k_bytes, v_bytes = k.shape[-1], v.shape[-1]
    tails = quantized.k_tail, quantized.v_tail
    options = {"BITS": quantized.bits, "IS_FLOAT": quantized.is_float, "TOKENS": 1, "CHANNEL_GROUPS": 1, "RING": 0}
    if quantized.bits < 8:
        options["TOKENS"] = k.shape[1] // quantized.k_scale.shape[1]
        options |= {"CHANNEL_GROUPS": quantized.v_scale.shape[3], "RING": quantized.k_tail.shape[1]}
    options["BYTES"], options["VALUE_BYTES"] = (max(32, triton.next_power_of_2(size)) for size in (k_bytes, v_bytes))
    options["BLOCK_D"] = max(16, triton.next_power_of_2(head_dim))
    beside = (scales[0], scales[2], *(tails if quantized.bits < 8 else scales[::2]))  # 8 bits have no tails: not read
    arrays = (k.view(torch.int32), v.view(torch.int32), *scales, *tails, quantized.quantized_seqlens)
    return arrays, beside, options
