"""Decode attention over scattered pages on a CPU, in full precision and in every quantized format, beside gathering the
pages for SDPA and beside SDPA over contiguous keys. Writes benchmarks/results/cpu_attention.json.

    python benchmarks/cpu_attention.py [--threads 1 2] [--batch 1 8] [--tokens 4096] [--repeats 15] [--output FILE]

All take turns. Each call is made over as many caches as take 64 MB, one after the other, so that keys and values are
not in the processor's cache, as for the layers of a model. Pages hold 16 tokens, of int4 64 and of int2 32, as those of
`PagedCache`; int4 and int2 keep their last tokens in rings. Ragged batches have lengths from 1/16 to all of the tokens,
which SDPA pads.

A record has of each the median, the fastest and the quartiles in milliseconds; GB/s of keys and values, to be compared
with the read bandwidth measured in the same process; and the speedup over SDPA over contiguous keys, by the medians and
by the fastest.
"""

import functools
import json
import os
import statistics
import time

import harness
import torch
import torch.nn.functional as F

from hf_efficient.cache.stores.kv_formats import KV_FORMATS
from hf_efficient.evaluation import environment
from hf_efficient.kernels.attention import api, masks


MODELS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}  # query heads, key heads, head dim
DTYPES = (torch.bfloat16, torch.float32)
PAGE = 16
GROUPS = {"int4": (4, 64), "int2": (2, 32)}  # bits, and tokens or channels that share a scale: those of PagedCache
RING, LAST = 320, 160  # tokens that a ring has room for, and tokens in it
COLD = 64 << 20  # bytes


def interleaved(calls: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, in turn, after a round to warm up. calls: name -> (function, arguments of its calls)."""
    times = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, (call, arguments) in calls.items():
            for given in arguments:
                start = time.perf_counter()
                call(**given)
                if round_:
                    times[name].append(time.perf_counter() - start)
    return times


def copies(tensors: dict) -> list[dict]:
    """The tensors and so many copies of them that all take `COLD` bytes."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    return [tensors, *({name: tensor.clone() for name, tensor in tensors.items()} for _ in range(COLD // size))]


def paged(keys, values, lengths: list[int], kv_format: str) -> dict:
    """keys, values [B, T, Hk, D] in pages, as keywords of flash_attn_with_kvcache."""
    batch, tokens, heads, dim = keys.shape
    bits, group = GROUPS.get(kv_format, (None, None))
    page = group or PAGE
    per_row = -(-tokens // page)
    table = torch.randperm(batch * per_row).view(batch, -1).int()
    where = dict(cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table)
    shape = batch * per_row, page, heads
    if bits is None:
        code = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kv_format, keys.dtype)
        where |= {name: torch.zeros(*shape, dim, dtype=code) for name in ("k_cache", "v_cache")}
        scales = {} if kv_format == "auto" else {name: torch.zeros(shape).half() for name in ("k_scale", "v_scale")}
        slots = (table[..., None] * page + torch.arange(page)).flatten(1)[:, :tokens].flatten().long()
        flat = keys.flatten(0, 1), values.flatten(0, 1)
        api.reshape_and_cache(*flat, where["k_cache"], where["v_cache"], slots, **scales)
        return where | scales
    where |= {name: torch.zeros(*shape, dim * bits // 8, dtype=torch.uint8) for name in ("k_cache", "v_cache")}
    where |= {name: torch.zeros(shape[0], 1, heads, dim).half() for name in ("k_scale", "k_min")}
    where |= {name: torch.zeros(*shape, dim // group).half() for name in ("v_scale", "v_min")}
    padded = (F.pad(x, (0, 0, 0, 0, 0, per_row * page - tokens)) for x in (keys, values))
    groups = (x.view(batch * per_row, page, heads, dim) for x in padded)
    names = "k_cache", "v_cache", "k_scale", "k_min", "v_scale", "v_min"
    api.quantize_and_cache(*groups, *(where[name] for name in names), table.flatten().long())
    stored = [max(0, length - LAST) // group * group for length in lengths]
    for name, x in (("k_tail", keys), ("v_tail", values)):
        where[name] = x.new_zeros(batch, RING, heads, dim)
        for row, (first, length) in enumerate(zip(stored, lengths)):
            where[name][row, torch.arange(first, length) % RING] = x[row, first:length]
    return where | dict(quantized_seqlens=torch.tensor(stored, dtype=torch.int32))


def measure(model: str, dtype: torch.dtype, lengths: list[int], repeats: int) -> dict:
    """One record."""
    (heads, kv_heads, dim), batch, longest = MODELS[model], len(lengths), max(lengths)
    q = torch.randn(batch, 1, heads, dim, dtype=dtype)
    keys, values = torch.randn(2, batch, longest, kv_heads, dim, dtype=dtype)  # tokens before heads, as in pages
    query = q.view(batch, kv_heads, -1, dim)  # the group's queries as rows of one product: each key is read once
    mask, seqlens = None, torch.tensor(lengths)
    if min(lengths) < longest:
        seen = masks.visibility(seqlens[:, None] - 1, seqlens, longest, True, (-1, -1))
        mask = masks.additive(seen)

    def contiguous(keys, values):
        return F.scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)

    def gathered(k_cache, v_cache, block_table, cache_seqlens):
        pages = (x.index_select(0, block_table.flatten()).view(batch, -1, kv_heads, dim) for x in (k_cache, v_cache))
        return contiguous(*(x[:, :longest] for x in pages))

    formats = {name: copies(paged(keys, values, lengths, name)) for name in KV_FORMATS}
    calls = {
        "contiguous_sdpa": (contiguous, copies(dict(keys=keys, values=values))),
        "gather_sdpa": (gathered, formats["auto"]),
    }
    calls |= {name: (functools.partial(api.flash_attn_with_kvcache, q), caches) for name, caches in formats.items()}
    results = {name: call(**arguments[0]).view_as(q).float() for name, (call, arguments) in calls.items()}
    expected, errors = results["contiguous_sdpa"], {}
    for name, result in results.items():
        errors[name] = round(((result - expected).norm() / expected.norm()).item(), 6)
    assert errors["auto"] < (1e-5 if dtype == torch.float32 else 1e-2), f"wrong result: {errors}"
    times = interleaved(calls, repeats)
    median = {name: statistics.median(values) for name, values in times.items()}
    fastest = {name: min(values) for name, values in times.items()}
    size = {
        name: sum(x.nbytes for x in caches[0].values()) * sum(lengths) / longest / batch
        for name, caches in formats.items()
    }
    record = {
        "model": model,
        "dtype": str(dtype)[6:],
        "threads": torch.get_num_threads(),
        "batch": batch,
        "lengths": "equal" if mask is None else "ragged",
        "milliseconds": harness.milliseconds(times, statistics.median),
        "fastest": harness.milliseconds(times, min),
        "quartiles": harness.milliseconds(times, harness.quartiles),
        "gigabytes_per_second": {name: round(size[name] / median[name] / 1e9, 2) for name in formats},
        "speedup_over_contiguous_sdpa": over_sdpa(median),
        "speedup_of_the_fastest": over_sdpa(fastest),
        "error": errors,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps({name: record[name] for name in record if name != "quartiles"}), flush=True)
    return record


def over_sdpa(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds["contiguous_sdpa"] / value, 2) for name, value in seconds.items()}


def main() -> None:
    parser = harness.parser(__doc__, "cpu_attention.json")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    shortest, batches = options.tokens // 16, []
    for batch in options.batch:
        batches.append([options.tokens] * batch)
        if batch > 1:
            ragged = [shortest + (options.tokens - shortest) * row // (batch - 1) for row in range(batch)]
            batches.append(ragged)
    records, bandwidth = [], {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth[threads] = round(harness.read_bandwidth(options.repeats), 1)
        records += [
            measure(model, dtype, lengths, options.repeats)
            for model in MODELS
            for dtype in DTYPES
            for lengths in batches
        ]
    result = {
        "question": "milliseconds (median) of one decode step's attention over a paged cache on CPU",
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "tokens": options.tokens,
        "read_bandwidth_gigabytes_per_second": bandwidth,
        "records": records,
    }
    harness.write(options.output, result)


if __name__ == "__main__":
    main()
