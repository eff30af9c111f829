"""Results of the decode kernels: written at once where one program has seen all keys of a lane, else added up by the
program that finishes last.

A part is float32: acc [ROWS, BLOCK_DV] and total [ROWS], both relative to 2**maximum [ROWS]. Program p has room for
two: part 2 p of a lane that began in an earlier program, part 2 p + 1 of a lane that begins in it. Parts are added in
the order of the programs, whichever finishes last.
"""

import contextlib
from contextvars import ContextVar

import torch
import triton
import triton.language as tl


_ROCM = tl.constexpr(torch.version.hip is not None)


_counters: dict[torch.device, torch.Tensor] = {}
_owned: ContextVar[torch.Tensor | None] = ContextVar("counters_of_a_graph", default=None)


@contextlib.contextmanager
def counters_in(buffer: torch.Tensor):
    """Inside, launches on the device of `buffer` (int32 zeros, which they leave zero) count in it as far as it is large
    enough. For the capture of a CUDA graph, which owns the buffer and whose launches do not overlap: it then needs no
    kernels that clear counters."""
    token = _owned.set(buffer)
    try:
        yield
    finally:
        _owned.reset(token)


def arrival_counters(programs: int, device: torch.device) -> torch.Tensor:
    """int32 [>= programs] of zeros that the kernels leave zero.

    The default stream of a device has one buffer, because its launches do not overlap. Other streams get new ones:
    graphs captured on one stream may be replayed on several, and torch.compile warms graphs up on a side stream, in a
    pool that must keep nothing.
    """
    owned = _owned.get()
    if owned is not None and owned.device == device and owned.numel() >= programs:
        return owned
    if device.type == "cpu" or torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return torch.zeros(programs, dtype=torch.int32, device=device)
    if device not in _counters or _counters[device].numel() < programs:
        _counters[device] = torch.zeros(max(programs, 1024), dtype=torch.int32, device=device)
    return _counters[device]


@triton.jit
def store_part(partial, statistics, part, acc, total, maximum, ROWS: tl.constexpr):
    """Stores acc [BLOCK_M, BLOCK_DV], of which the first ROWS rows are real."""
    row = tl.arange(0, acc.shape[0])
    column = tl.arange(0, acc.shape[1])
    real = row < ROWS
    at = part * ROWS + row
    tl.store(partial + (at * acc.shape[1])[:, None] + column[None, :], acc, mask=real[:, None])
    tl.store(statistics + at * 2, maximum, mask=real)
    tl.store(statistics + at * 2 + 1, total, mask=real)


@triton.jit
def arrives_last(arrivals, first, last):
    """Whether this program is the last of programs first..last to store its part of the lane that begins in `first`."""
    if _ROCM:  # its barrier does not wait for the stores of other wavefronts: each makes its own visible
        tl.atomic_add(arrivals + first + tl.zeros([512], tl.int32), 0, sem="release", scope="gpu")
    tl.debug_barrier()  # every thread's part is written before one thread says so
    before = tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu")
    is_last = before == last - first
    if is_last:
        tl.store(arrivals + first, 0)
    return is_last


@triton.jit
def add_parts(partial, statistics, first, last, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, STEP: tl.constexpr):
    """acc, total, maximum of ROWS rows, added up from the parts of programs first..last, STEP at once."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_DV)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for start in tl.range(first, last + 1, STEP, num_stages=3):
        program = start + tl.arange(0, STEP)
        there = (program <= last)[:, None] & (row >= 0)[None, :]
        at = (2 * program + (program == first))[:, None] * ROWS + row[None, :]
        part_maximum = tl.load(statistics + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(statistics + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        pointers = partial + (at * BLOCK_DV)[:, :, None] + column[None, None, :]
        part = tl.load(pointers, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(maximum, tl.max(part_maximum, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(part_maximum - base[None, :])
        shrink = tl.exp2(maximum - base)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(part_total * weight, 0)
        maximum = higher
    return acc, total, maximum


@triton.jit
def write_rows(
    out, lse, sinks, acc, total, maximum, cu_seqlens_q, tokens, sequence, kv_head, m, seqlen_q, kv_heads, channel,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Writes rows m (query m // GROUP, head m % GROUP of the group) of the result.

    out is contiguous [B, Sq, Hq, Dv], lse float32 [B, Hq, Sq] or None; with cu_seqlens_q out is [T, Hq, Dv] and lse
    [Hq, tokens], and the last queries of the Sq are those of the sequence. channel [BLOCK_DV]: the channel of each
    column of acc; columns of VALUE_DIM and above are not written.
    """
    valid = m < seqlen_q * GROUP
    query = m // GROUP
    token = sequence * seqlen_q + query
    if cu_seqlens_q is not None:
        token = tl.load(cu_seqlens_q + sequence + 1).to(tl.int64) - seqlen_q + query
        valid = valid & (token >= tl.load(cu_seqlens_q + sequence))
    head = kv_head * GROUP + m % GROUP
    heads = kv_heads * GROUP
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(maximum, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(maximum - base)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - base)
        maximum = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    if lse is not None:
        value = tl.where(total == 0.0, float("-inf"), (maximum + tl.log2(divisor)) * 0.6931471805599453)
        at = (sequence * heads + head) * seqlen_q + query
        if cu_seqlens_q is not None:
            at = head.to(tl.int64) * tokens + token
        tl.store(lse + at, value, mask=valid)
    pointers = out + ((token * heads + head) * VALUE_DIM)[:, None] + channel[None, :]
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(pointers, result, mask=valid[:, None] & (channel < VALUE_DIM)[None, :])


@triton.jit
def finish_lane(
    out, lse, sinks, partial, statistics, arrivals, acc, total, maximum, cu_seqlens_q, tokens, sequence, kv_head, tile,
    lane_start, lane_tiles, first, last, share, seqlen_q, kv_heads, channel,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Stores or writes this program's sums over key tiles first..last of a lane (query tile `tile` of a key head).

    The lane has lane_tiles tiles, from lane_start on in the sequence of all tiles.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_DV: tl.constexpr = acc.shape[1]
    if last - first == lane_tiles:
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        write_rows(
            out, lse, sinks, acc, total, maximum, cu_seqlens_q, tokens, sequence, kv_head, m, seqlen_q, kv_heads,
            channel, GROUP, VALUE_DIM,
        )  # fmt: skip
    else:
        first_program = lane_start // share
        last_program = (lane_start + lane_tiles - 1) // share
        part = 2 * tl.program_id(0).to(tl.int64) + (first == 0)
        store_part(partial, statistics, part, acc, total, maximum, ROWS)
        if arrives_last(arrivals, first_program, last_program):
            sums = add_parts(partial, statistics, first_program, last_program, ROWS, BLOCK_DV, STEP)
            m = tile * BLOCK_M + tl.arange(0, ROWS)
            write_rows(
                out, lse, sinks, sums[0], sums[1], sums[2], cu_seqlens_q, tokens, sequence, kv_head, m, seqlen_q,
                kv_heads, channel, GROUP, VALUE_DIM,
            )  # fmt: skip
