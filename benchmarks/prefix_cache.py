"""Time to the first token of a prompt whose beginning was seen before, on SmolLM2-135M-Instruct. Writes
benchmarks/results/prefix_cache.json.

    python benchmarks/prefix_cache.py [--threads 2] [--tokens 1000 1024] [--shared 960] [--repeats 9] [--output FILE]

Every repeat takes two prompts of new text that share `--shared` of `--tokens` tokens, and runs in turn, each as
generate(max_new_tokens=1):
- second_without: the second, without a prefix cache (an empty PagedCache);
- second_dynamic: the second, with transformers' DynamicCache and sdpa;
- first: the first, which the PrefixCache has not seen; stores its blocks;
- second: the second, which restores the shared blocks.

A record has of each the median in milliseconds, the quartiles, the fastest, and the median CPU time of all threads,
which other work on the machine disturbs least. `speedup` is `second_without` over `second`: of the medians, of the
fastest, and of the CPU times.
"""

import json
import os
import statistics
import time

import harness
import torch
from transformers import DynamicCache

import hf_efficient
from hf_efficient.evaluation import environment, samples


def first_token(model, implementation: str, ids: torch.Tensor, cache) -> tuple[int, float, float]:
    """The first token after `ids` [1, tokens], the seconds it took, and those of the processor."""
    model.set_attn_implementation(implementation)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    start, start_cpu = time.perf_counter(), time.process_time()
    output = model.generate(**inputs, past_key_values=cache)
    return int(output[0, -1]), time.perf_counter() - start, time.process_time() - start_cpu


def measure(dtype: torch.dtype, tokens: int, shared: int, repeats: int) -> dict:
    """One record."""
    model = harness.load(dtype=dtype)
    text = harness.tokenizer()(samples.sample_text(), return_tensors="pt")["input_ids"]
    prefix = hf_efficient.PrefixCache(model, num_blocks=4 * tokens // 16)  # soon full
    times = {name: [] for name in ("second_without", "second_dynamic", "first", "second")}
    cpu_times = {name: [] for name in times}
    same = 0
    for repeat in range(repeats + 1):
        start = repeat * (2 * tokens - shared)
        beginning, end = text[:, start : start + shared], start + 2 * tokens - shared
        prompts = {
            "first": torch.cat([beginning, text[:, start + shared : start + tokens]], 1),
            "second": torch.cat([beginning, text[:, start + tokens : end]], 1),
        }
        calls = {
            "second_without": ("flash_paged", hf_efficient.PagedCache(model.config)),
            "second_dynamic": ("sdpa", DynamicCache(config=model.config)),
            "first": ("flash_paged", hf_efficient.PagedCache(model.config, prefix_cache=prefix)),
            "second": ("flash_paged", hf_efficient.PagedCache(model.config, prefix_cache=prefix)),
        }
        skipped, found = prefix.stats()["skipped_tokens"], {}
        for name, (implementation, cache) in calls.items():
            found[name], seconds, cpu_seconds = first_token(model, implementation, prompts[name.split("_")[0]], cache)
            if repeat:  # after a round to warm up
                times[name].append(seconds)
                cpu_times[name].append(cpu_seconds)
        assert prefix.stats()["skipped_tokens"] - skipped == shared // 16 * 16
        same += found["second"] == found["second_without"]
    median, cpu = (harness.milliseconds(each, statistics.median, 1) for each in (times, cpu_times))
    fastest = harness.milliseconds(times, min, 1)
    record = {
        "dtype": str(dtype)[6:],
        "tokens": tokens,
        "milliseconds": median,
        "quartiles": harness.milliseconds(times, harness.quartiles, 1),
        "fastest": fastest,
        "processor_milliseconds": cpu,
        "speedup": {
            name: round(values["second_without"] / values["second"], 2)
            for name, values in (("median", median), ("fastest", fastest), ("processor", cpu))
        },
        "same_first_token": f"{same} of {repeats + 1}",
    }
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    parser = harness.parser(__doc__, "prefix_cache.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 1024])
    parser.add_argument("--shared", type=int, default=960)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = [
        measure(dtype, tokens, options.shared, options.repeats)
        for dtype in (torch.bfloat16, torch.float32)
        for tokens in options.tokens
    ]
    result = {
        "question": "milliseconds (median) to the first token of a prompt whose beginning was seen before",
        "model": samples.SAMPLE_MODEL,
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "shared": options.shared,
        "repeats": options.repeats,
        "records": records,
    }
    harness.write(options.output, result)


if __name__ == "__main__":
    main()
