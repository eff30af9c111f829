"""Decode attention over scattered pages on CPU: the pages read in segments, beside gathering them for SDPA and beside SDPA
over keys that are contiguous already. Writes benchmarks/results/cpu_attention.json.

The three run in turn, many times; a record has the median of each in milliseconds, the quartiles, and GB/s of keys and
values beside the read bandwidth measured in the same process. Ragged batches have lengths from 1/16 to all of the tokens,
and SDPA pads them. Quantized pages (of the same keys) are in the record too.

    python benchmarks/cpu_attention.py [--threads 2] [--batch 8] [--tokens 4096] [--repeats 25] [--output FILE]
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from hf_efficient.evaluation import environment
from hf_efficient.kernels import attention, attention_cpu_masks


ROOT = Path(__file__).resolve().parents[1]
MODELS = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}  # query heads, key heads, head dim
PAGES = (16, 64, 256)
DTYPES = (torch.bfloat16, torch.float32)


def interleaved(calls: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, in turn, after a round to warm up."""
    times = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def read_bandwidth(repeats: int) -> float:
    """GB/s of a sum over 512 MB, the best of `repeats`."""
    numbers = torch.ones(1 << 27)
    return numbers.nbytes / min(interleaved({"sum": numbers.sum}, repeats)["sum"]) / 1e9


def quantized(k_cache, v_cache, dtype) -> dict:
    """The pages in int8 or fp8 with their scales, as keywords of flash_attn_with_kvcache."""
    result = {}
    for name, cache in (("k", k_cache), ("v", v_cache)):
        scale = (cache.float().abs().amax(-1) / (127 if dtype == torch.int8 else 448)).half()
        codes = cache.float() / scale.float()[..., None]
        result[f"{name}_cache"] = (codes.round() if dtype == torch.int8 else codes).to(dtype)
        result[f"{name}_scale"] = scale
    return result


def measure(model: str, page: int, dtype: torch.dtype, lengths: list[int], repeats: int) -> dict:
    """One record."""
    (heads, kv_heads, dim), batch, longest = MODELS[model], len(lengths), max(lengths)
    per_row = -(-longest // page)
    k_cache, v_cache = (torch.randn(batch * per_row, page, kv_heads, dim, dtype=dtype) for _ in range(2))
    q = torch.randn(batch, 1, heads, dim, dtype=dtype)
    blocks = torch.randperm(batch * per_row)
    table, seqlens = blocks.view(batch, -1).int(), torch.tensor(lengths, dtype=torch.int32)
    query = q.view(batch, kv_heads, -1, dim)  # the group's queries as rows of one product: each key is read once
    mask = None
    if min(lengths) < longest:
        seen = attention_cpu_masks.visibility(seqlens[:, None] - 1, seqlens, longest, True, (-1, -1))
        mask = attention_cpu_masks.additive(seen)

    def gather():
        return [
            cache.index_select(0, blocks).view(batch, -1, kv_heads, dim)[:, :longest].transpose(1, 2)
            for cache in (k_cache, v_cache)
        ]

    contiguous = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in gather()]  # tokens before heads, as in pages
    where = dict(cache_seqlens=seqlens, block_table=table)
    calls = {
        "pages": lambda: attention.flash_attn_with_kvcache(q, k_cache, v_cache, **where),
        "gather_sdpa": lambda: F.scaled_dot_product_attention(query, *gather(), attn_mask=mask),
        "contiguous_sdpa": lambda: F.scaled_dot_product_attention(query, *contiguous, attn_mask=mask),
    }
    for kind in (torch.int8, torch.float8_e4m3fn):
        codes = quantized(k_cache, v_cache, kind)
        calls[f"pages_{str(kind)[6:]}"] = lambda codes=codes: attention.flash_attn_with_kvcache(q, **codes, **where)
    expected = calls["contiguous_sdpa"]().view_as(q).float()
    error = (calls["pages"]().float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), f"wrong result: {error}"
    times = interleaved(calls, repeats)
    size = 2 * sum(lengths) * kv_heads * dim * dtype.itemsize
    median = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "model": model,
        "page": page,
        "dtype": str(dtype)[6:],
        "lengths": "ragged" if mask is not None else "equal",
        "milliseconds": {name: round(value * 1e3, 3) for name, value in median.items()},
        "quartiles": {
            name: [round(value * 1e3, 3) for value in statistics.quantiles(values)[::2]]
            for name, values in times.items()
        },
        "gigabytes_per_second": {name: round(size / median[name] / 1e9, 2) for name in list(calls)[:3]},
        "speedup_over_gather_sdpa": round(median["gather_sdpa"] / median["pages"], 2),
        "speedup_over_contiguous_sdpa": round(median["contiguous_sdpa"] / median["pages"], 2),
    }
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/cpu_attention.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    batches = [[options.tokens] * options.batch]
    if options.batch > 1:
        shortest = options.tokens // 16
        batches.append(
            [shortest + (options.tokens - shortest) * row // (options.batch - 1) for row in range(options.batch)]
        )
    bandwidth = read_bandwidth(options.repeats)
    records = [
        measure(model, page, dtype, lengths, options.repeats)
        for model in MODELS
        for dtype in DTYPES
        for lengths in batches
        for page in (PAGES if lengths is batches[0] else PAGES[:1])
    ]
    result = {
        "question": "milliseconds (median) of one decode step's attention over a paged cache on CPU",
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "batch": options.batch,
        "tokens": options.tokens,
        "read_bandwidth_gigabytes_per_second": round(bandwidth, 1),
        "records": records,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
