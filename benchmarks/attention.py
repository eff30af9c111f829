"""Are the attention kernels right, and how fast are they beside the limits of the machine and beside their peers?

    [PYTHONPATH=.] python benchmarks/attention.py [--quick] [--output benchmarks/results/gpu_attention.json]

Prefill: batch * length = 16k tokens, hidden size 2048, as in the figures of FlashAttention-3. Decode: Llama-3-8B's
heads over caches of 134 MB to 2 GB, in pages and contiguous, of equal and of very unequal lengths, and quantized.
Peers, in the same process: torch SDPA by backend, FlexAttention (compiled), flash-attn where it imports. See
gpu_timing.py for how.
"""

import functools
import itertools
import sys

import torch
import torch.nn.functional as F
from gpu_timing import Benchmark, error, lowest, speedup
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from hf_efficient.kernels import flash_paged


HIDDEN = 2048
PREFILL = [(512, 32), (1024, 16), (2048, 8), (4096, 4), (8192, 2), (16384, 1)]  # length, batch
DECODE = [(1, 65536), (16, 8192), (64, 2048), (16, 32768)]  # batch, context
GROUPS = (1, 4, 8)  # query heads a key head
KV_HEADS = 8
SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": 4, "int2": 2}


def sdpa(q, k, v, backend, causal):
    """Over [B, S, H, D], as flash_attn_func takes them."""
    with sdpa_kernel(backend):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _flex():
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024  # one a shape
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than time it uncompiled
    return torch.compile(flex_attention.flex_attention, dynamic=False)


def flex(q, k, v, block_mask):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return _flex()(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


def peers(bench: Benchmark, causal: bool, length: int) -> dict:
    """name -> function of (q, k, v) over [B, S, H, D]."""
    found = {name: functools.partial(sdpa, backend=backend, causal=causal) for name, backend in SDPA.items()}
    if bench.tiny:
        return {"SDPA math": functools.partial(sdpa, backend=SDPBackend.MATH, causal=causal)}
    mask = None
    if causal:
        mask = flex_attention.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=bench.device
        )
    found["FlexAttention"] = functools.partial(flex, block_mask=mask)
    try:
        import flash_attn
    except ImportError:
        return found
    return {**found, "flash-attn": functools.partial(flash_attn.flash_attn_func, causal=causal)}


def prefill(bench: Benchmark, length: int, batch: int, dim: int, causal: bool) -> None:
    heads = 2 if bench.tiny else HIDDEN // dim
    shape = (batch, length, heads, dim)
    data = [[bench.random(*shape) for _ in range(3)] for _ in range(bench.copies_of(6 * batch * length * heads * dim))]

    def attend(i):
        return flash_paged.flash_attn_func(*data[i], causal=causal)

    def check():  # two heads of the first and of the last row, whole: the reference keeps all scores
        return checked(attend(0), data[0], causal)

    case = dict(D=dim, S=length, B=batch, causal=causal)
    work = 8 * batch * length * heads * dim, 4 * batch * heads * length**2 * dim * (0.5 if causal else 1)
    bench.record(dict(kernel="flash_paged prefill", ours=True, **case), attend, len(data), *work, check)
    for name, attention in () if bench.ours else peers(bench, causal, length).items():
        peer = dict(kernel=f"{name} prefill", ours=False, **case)
        bench.record(peer, lambda i, attention=attention: attention(*data[i]), len(data), *work)


def checked(out, tensors, causal) -> float:
    """The larger error of two heads of the first row and two of the last."""
    parts = (slice(0, 1), slice(0, 2)), (slice(-1, None), slice(-2, None))
    return max(
        error(
            out[rows, :, heads],
            flash_paged.flash_attn_func_reference(*(tensor[rows, :, heads] for tensor in tensors), causal=causal),
        )
        for rows, heads in parts
    )


def packed_prefill(bench: Benchmark, lengths: list[int], dim: int = 128) -> None:
    """A padded batch of which half is padding: packed here, masked in SDPA; and the same over pages."""
    heads, kv_heads = (2, 1) if bench.tiny else (32, KV_HEADS)
    total, longest = sum(lengths), max(lengths)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=bench.device)
    q, k, v = bench.random(total, heads, dim), *(bench.random(total, kv_heads, dim) for _ in range(2))
    arguments = (bounds, bounds, longest, longest)

    def attend(i, attention=flash_paged.flash_attn_varlen_func):
        return attention(q, k, v, *arguments, causal=True)

    def check():
        return error(attend(0), attend(0, flash_paged.flash_attn_varlen_func_reference))

    case = dict(D=dim, S=longest, B=len(lengths), causal=True)
    work = 4 * total * (heads + kv_heads) * dim, 2 * heads * dim * sum(length**2 for length in lengths)
    bench.record(dict(kernel="flash_paged packed prefill", ours=True, **case), attend, 1, *work, check)
    padded = [bench.random(len(lengths), heads, longest, dim) for _ in range(3)]  # no backend takes groups and a mask
    mask = torch.ones(longest, longest, dtype=torch.bool, device=bench.device).tril()
    real = torch.arange(longest, device=bench.device) < torch.tensor(lengths, device=bench.device)[:, None]
    mask = mask & real[:, None, None, :]

    def masked(i):
        with sdpa_kernel(SDPBackend.MATH if bench.tiny else SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(*padded, attn_mask=mask)

    bench.record(dict(kernel="SDPA with a mask, padded prefill", ours=False, **case), masked, 1, *work)
    for block in (16,) if bench.tiny else (16, 64):
        paged_prefill(bench, lengths, q, (bounds, bounds, longest, longest), {**case, "block": block}, work)


def paged_prefill(bench: Benchmark, lengths: list[int], q, arguments: tuple, case: dict, work: tuple) -> None:
    """The prompts of `packed_prefill`, whose keys and values lie in shuffled pages."""
    block, kv_heads = case["block"], 1 if bench.tiny else KV_HEADS
    blocks = [-(-length // block) for length in lengths]
    table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32, device=bench.device)
    for row, pages in enumerate(torch.randperm(sum(blocks), device=bench.device).to(torch.int32).split(blocks)):
        table[row, : len(pages)] = pages
    k_pages, v_pages = (bench.random(sum(blocks), block, kv_heads, case["D"]) for _ in range(2))

    def attend(i, attention=flash_paged.flash_attn_varlen_func):
        return attention(q, k_pages, v_pages, *arguments, causal=True, block_table=table)

    def check():
        return error(attend(0), attend(0, flash_paged.flash_attn_varlen_func_reference))

    bench.record(dict(kernel="flash_paged paged prefill", ours=True, **case), attend, 1, *work, check)


class Pages:
    """A random cache of a batch in shuffled pages; with a format, quantized by the kernels' own write functions."""

    def __init__(self, bench, lengths: list[int], block: int, kv_heads: int, dim: int, kv_format: str | None):
        self.blocks = [-(-length // block) for length in lengths]
        count = sum(self.blocks)
        self.table = torch.full((len(lengths), max(self.blocks)), -1, dtype=torch.int32, device=bench.device)
        for row, pages in enumerate(torch.randperm(count, device=bench.device).to(torch.int32).split(self.blocks)):
            self.table[row, : len(pages)] = pages
        self.seqlens = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
        k, v = (bench.random(count, block, kv_heads, dim) for _ in range(2))
        self.extra = {}
        made = dict(device=bench.device)
        if kv_format is None:
            self.k, self.v = k, v
            return
        if kv_format in ("int8", "fp8"):
            self.k, self.v = (torch.zeros(k.shape, dtype=FORMATS[kv_format], **made) for _ in range(2))
            scales = [torch.zeros(k.shape[:-1], dtype=torch.float16, **made) for _ in range(2)]
            self.extra = dict(k_scale=scales[0], v_scale=scales[1])
            slots = torch.arange(count * block, device=bench.device)
            flash_paged.reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), self.k, self.v, slots, *scales)
            return
        bits, half = FORMATS[kv_format], torch.float16
        self.k, self.v = (torch.zeros(*k.shape[:-1], dim * bits // 8, dtype=torch.uint8, **made) for _ in range(2))
        keys = [torch.zeros(count, 1, kv_heads, dim, dtype=half, **made) for _ in range(2)]
        values = [torch.zeros(count, block, kv_heads, 1, dtype=half, **made) for _ in range(2)]
        groups = torch.arange(count, device=bench.device)
        flash_paged.quantize_and_cache(k, v, self.k, self.v, *keys, *values, groups)
        tails = [bench.random(len(lengths), block, kv_heads, dim) for _ in range(2)]
        self.extra = dict(k_scale=keys[0], k_min=keys[1], v_scale=values[0], v_min=values[1])
        self.extra |= dict(k_tail=tails[0], v_tail=tails[1], quantized_seqlens=self.seqlens // block * block)

    def bytes(self) -> int:
        """What a step reads: every page with its scales."""
        paged = [self.k, self.v, *(self.extra.get(name) for name in ("k_scale", "k_min", "v_scale", "v_min"))]
        return sum(tensor.numel() * tensor.element_size() for tensor in paged if tensor is not None)


def decode(bench: Benchmark, lengths: list[int], block: int, group: int, kv_format: str | None, label: str, dim=128):
    kv_heads = 1 if bench.tiny else KV_HEADS
    first = Pages(bench, lengths, block, kv_heads, dim, kv_format)
    kv_bytes = first.bytes()
    caches = [first] + [
        Pages(bench, lengths, block, kv_heads, dim, kv_format) for _ in range(bench.copies_of(kv_bytes) - 1)
    ]
    heads = kv_heads * group
    q = bench.random(len(lengths), 1, heads, dim)

    def attend(i, attention=flash_paged.flash_attn_with_kvcache, rows=slice(None)):
        cache = caches[i]
        extra = dict(cache.extra)
        for name in ("k_tail", "v_tail", "quantized_seqlens"):
            if name in extra:
                extra[name] = extra[name][rows]
        arguments = dict(cache_seqlens=cache.seqlens[rows], block_table=cache.table[rows], causal=True, **extra)
        return attention(q[rows], cache.k, cache.v, **arguments)

    def check():
        batch = len(lengths)
        rows = sorted({0, batch // 2, batch - 1, lengths.index(min(lengths)), lengths.index(max(lengths))})
        expected = attend(0, flash_paged.flash_attn_with_kvcache_reference, rows)
        return error(attend(0)[rows], expected)

    case = dict(D=dim, context=max(lengths), B=len(lengths), group=group, block=block, format=kv_format, lengths=label)
    work = kv_bytes, 4 * heads * sum(lengths) * dim
    bench.record(dict(kernel="flash_paged decode", ours=True, **case), attend, len(caches), *work, check)
    if block == 16 and kv_format is None and label == "equal":
        contiguous_decode(bench, caches, q, lengths, case, work)


def contiguous_decode(bench: Benchmark, caches: list[Pages], q, lengths: list[int], case: dict, work: tuple) -> None:
    """The same keys and values without pages: ours, and the peers."""
    shape = (len(lengths), lengths[0], *caches[0].k.shape[2:])
    dense = [[pages.reshape(shape) for pages in (cache.k, cache.v)] for cache in caches]

    def attend(i):
        return flash_paged.flash_attn_func(q, *dense[i], causal=True)

    def check():
        return error(
            attend(0)[:1], flash_paged.flash_attn_func_reference(q[:1], *(t[:1] for t in dense[0]), causal=True)
        )

    case = {**case, "block": None}
    bench.record(dict(kernel="flash_paged decode", ours=True, **case), attend, len(dense), *work, check)
    for name, attention in () if bench.ours else peers(bench, False, 1).items():
        peer = dict(kernel=f"{name} decode", ours=False, **case)
        bench.record(peer, lambda i, attention=attention: attention(q, *dense[i]), len(dense), *work)


def cache_writes(bench: Benchmark, tokens: int, dim: int = 128) -> None:
    heads = 1 if bench.tiny else KV_HEADS
    k, v = bench.random(tokens, heads, dim), bench.random(tokens, heads, dim)
    slots = torch.randperm(tokens, device=bench.device)
    for name in (None, "int8", "fp8"):
        count = bench.copies_of(4 * k.numel())
        caches = [Pages(bench, [tokens], 16, heads, dim, name) for _ in range(count)]
        cache = caches[0]

        def write(i, caches=caches):
            cache = caches[i]
            flash_paged.reshape_and_cache(k, v, cache.k, cache.v, slots, *cache.extra.values())

        def check(cache=cache, write=write, name=name):
            write(0)
            expected = Pages(bench, [tokens], 16, heads, dim, name)
            flash_paged.reshape_and_cache_reference(k, v, expected.k, expected.v, slots, *expected.extra.values())
            pairs = zip((cache.k, cache.v, *cache.extra.values()), (expected.k, expected.v, *expected.extra.values()))
            return 0.0 if all(torch.equal(a.float(), b.float()) for a, b in pairs) else float("inf")

        case = dict(kernel="flash_paged reshape_and_cache", ours=True, T=tokens, format=name)
        bench.record(case, write, len(caches), 2 * k.numel() * (k.element_size() + cache.k.element_size()), 0, check)


def ragged(batch: int, longest: int) -> list[int]:
    """Lengths from longest / 10 to longest, most of them short: a skew of 10."""
    return [max(1, round(longest * 0.1 ** (row / max(1, batch - 1)))) for row in range(batch)]


def goals(bench: Benchmark) -> list[tuple]:
    """What this run is to reach, as `harness.goals` takes it."""
    full, causal = (
        lowest(bench.find(kernel="flash_paged prefill", D=128, S=16384, causal=flag), "of_matmul")
        for flag in (False, True)
    )
    from_1k = [line for line in bench.find(kernel="flash_paged prefill") if line["D"] <= 128 and line["S"] >= 1024]
    packed, masked = (
        bench.find(kernel=name) for name in ("flash_paged packed prefill", "SDPA with a mask, padded prefill")
    )
    decoded = dict(kernel="flash_paged decode", format=None, lengths="equal")
    in_bf16, groups_of_4 = bench.find(**decoded), bench.find(**decoded, group=4)
    contiguous = [line for line in groups_of_4 if line["block"] is None]
    paged = [line for line in groups_of_4 if line["block"]]
    large = [line for line in groups_of_4 if line["B"] * line["context"] * KV_HEADS * 512 >= 256e6]
    longest = [line for line in large if line["block"] == 16 and (line["B"], line["context"]) == DECODE[-1]]
    uneven = bench.find(kernel="flash_paged decode", format=None, lengths="ragged")
    of_equal = (lowest(uneven, "gb_s") or 0) / (lowest(longest, "gb_s") or float("inf")) if uneven else None

    def times_bf16(name):
        lines = [x for x in bench.find(kernel="flash_paged decode", format=name) if x["B"] * x["context"] >= 512e3]
        return speedup(lines, in_bf16, ("B", "context", "block", "group"))

    def times_peer(lines, name, same):
        return speedup(lines, bench.find(kernel=name), same)

    shape, cache = ("D", "S", "causal"), ("B", "context", "group")
    return [
        ("prefill d128 full 16k, of the matrix rate", 0.70, full),
        ("prefill d128 full 16k, on the way to", 0.84, full),
        ("prefill d128 causal 16k, of the matrix rate", 0.80, causal),
        *(
            (f"prefill from 1k, d64 and d128, times {name}", 1.05, times_peer(from_1k, f"{name} prefill", shape))
            for name in (*SDPA, "FlexAttention")
        ),
        ("packed prefill, times SDPA with a mask", 1.9, speedup(packed, masked, ("B",))),
        ("decode, cache of 256 MB and more, of copy bandwidth", 0.93, lowest(large, "of_copy")),
        ("paged decode, times contiguous", 0.97, speedup(paged, contiguous, cache)),
        *((f"decode, times {name}", 1.0, times_peer(contiguous, f"{name} decode", cache)) for name in SDPA),
        *(
            (f"{name} decode at 512k tokens, times our bf16", least, times_bf16(name))
            for name, least in (("int8", 1.85), ("fp8", 1.85), ("int4", 3.3), ("int2", 5.0))
        ),
        ("ragged decode, of the bandwidth of equal lengths", 0.90, of_equal),
    ]


def tiny_cases(bench: Benchmark) -> None:
    for name in (None, *FORMATS):
        decode(bench, [48, 48], 16 if name is None else 32, 2, name, "equal", dim=64)
    decode(bench, ragged(3, 40), 16, 2, None, "ragged", dim=64)
    prefill(bench, 40, 1, 64, True)
    packed_prefill(bench, [17, 1, 40], 64)
    cache_writes(bench, 32, 64)


def cases(bench: Benchmark) -> None:
    """Those of decoding first: most kernels here are for it."""
    for batch, context in DECODE[-1:] if bench.quick else DECODE:
        for block in (16,) if bench.quick or not bench.ours else (16, 64, 256):
            decode(bench, [context] * batch, block, 4, None, "equal")
    if bench.ours:
        for group in (4,) if bench.quick else GROUPS:
            batch, context = DECODE[-1]
            for name in (None, *FORMATS):
                decode(bench, [context] * batch, 64, group, name, "equal")
        decode(bench, ragged(32, 65536), 16, 4, None, "ragged")
    lengths, dims = ([PREFILL[2], PREFILL[-1]], [128]) if bench.quick else (PREFILL, [64, 128, 256])
    for (length, batch), dim, causal in itertools.product(lengths, dims, [False, True]):
        prefill(bench, length, batch, dim, causal)
    packed_prefill(bench, [17, 4096, 300, 1024, 1, 2000, 3000, 1500])
    if bench.ours:
        cache_writes(bench, 8192)


def main(arguments: list[str] | None = None) -> int:
    bench = Benchmark("attention", __doc__, arguments)
    with torch.no_grad():
        for _ in bench.turns():
            (tiny_cases if bench.tiny else cases)(bench)
    return bench.finish(goals(bench))


if __name__ == "__main__":
    sys.exit(main())
