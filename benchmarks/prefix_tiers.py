"""Time to the first token of a prompt that was seen before, by where its blocks lie, on SmolLM2-135M-Instruct. Writes
benchmarks/results/prefix_tiers.json.

    python benchmarks/prefix_tiers.py [--threads 1] [--tokens 1024] [--repeats 5] [--output FILE]

The pool and host memory have room for one prompt each, the file for four. Every repeat takes three prompts of new text,
asks for them once (`new`), and then for one that lies on the disk, one in host memory and one in the pool. The file is
dropped from the system's page cache before it is read. `recomputed`: tokens that ran again because that was expected to
be faster.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import harness
import torch

import hf_efficient
from hf_efficient.evaluation import environment, samples


def ask(model, prefix, ids: torch.Tensor) -> float:
    cache = hf_efficient.PagedCache(model.config, prefix_cache=prefix)
    start = time.perf_counter()
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - start


def forget(folder: str) -> None:
    """Writes the files out and drops them from the page cache."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = harness.parser(__doc__, "prefix_tiers.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = harness.load()
    model.set_attn_implementation("flash_paged")
    text = harness.tokenizer()(samples.sample_text(), return_tensors="pt")["input_ids"]
    blocks, config = options.tokens // 16, model.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    room = blocks * 2 * config.num_hidden_layers * 16 * heads * 2
    times = {name: [] for name in ("new", "disk", "host", "pool")}
    with tempfile.TemporaryDirectory() as folder:
        offload = hf_efficient.PrefixOffload(room, folder, 4 * room)
        prefix = hf_efficient.PrefixCache(model, blocks, offload=offload)
        for repeat in range(options.repeats + 1):
            start = 3 * repeat * options.tokens
            prompts = text[:, start : start + 3 * options.tokens].split(options.tokens, 1)
            rows = {"new": statistics.median(ask(model, prefix, ids) for ids in prompts)}
            before = [prefix.stats()[f"{name}_hits"] for name in ("disk", "host", "pool")]
            forget(folder)
            rows["disk"] = ask(model, prefix, prompts[0])  # 2 to host memory, 1 to the disk
            rows["host"] = ask(model, prefix, prompts[2])
            rows["pool"] = ask(model, prefix, prompts[2])
            after = [prefix.stats()[f"{name}_hits"] for name in ("disk", "host", "pool")]
            print(rows, [b - a for a, b in zip(before, after)], flush=True)
            if repeat:  # after a round to warm up
                for name, seconds in rows.items():
                    times[name].append(seconds)
        recomputed = prefix.stats()["recomputed_tokens"]
    result = {
        "question": "milliseconds (median) to the first token of a prompt, by where its blocks lie",
        "model": samples.SAMPLE_MODEL,
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "tokens": options.tokens,
        "megabytes": round(room / 1e6, 1),
        "milliseconds": harness.milliseconds(times, statistics.median, 1),
        "quartiles": harness.milliseconds(times, harness.quartiles, 1),
        "recomputed": recomputed,
    }
    print(result)
    harness.write(options.output, result)


if __name__ == "__main__":
    main()
