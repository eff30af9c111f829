"""The first token of a process that decodes what another one read, on SmolLM2-135M-Instruct. Writes
benchmarks/results/prefill_decode.json.

    python benchmarks/prefill_decode.py [--threads 1] [--tokens 512 1024] [--repeats 5] [--output FILE]

Every repeat takes a prompt of new text, and runs in turn:
- single: one process reads all of it but its last token, and then that, which gives the first token;
- two: another process reads all but the last token and sends its PagedCache; this one receives it and reads the last
  token. The time begins when the prompt is handed over;
- transfer: as many bytes as the pages of all layers go through the same pipe, in the same pieces.

`ratio` is two / (single + transfer), of the medians. The other process has its model loaded.
"""

import json
import multiprocessing
import os
import statistics
import time

import harness
import torch

import hf_efficient
from hf_efficient.cache.channels import Pipe
from hf_efficient.evaluation import environment, samples


def load():
    model = harness.load(dtype=torch.bfloat16)
    model.set_attn_implementation("flash_paged")
    return model


@torch.no_grad()
def read(model, cache, ids: torch.Tensor) -> int:
    return int(model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())


def prefill_process(connection, threads: int) -> None:
    """Answers each prompt with the cache of all but its last token, and each number with as many bytes."""
    torch.set_num_threads(threads)
    model, channel = load(), Pipe(connection)
    channel.put({})
    while (message := channel.get()) != {}:
        if "bytes" in message:
            blob = torch.zeros(message["bytes"], dtype=torch.uint8)
            channel.put({})
            channel.put_tensor(blob)
        else:
            cache = hf_efficient.PagedCache(model.config)
            read(model, cache, torch.tensor([message["ids"]]))
            cache.send(connection, model)


def measure(model, connection, tokens: int, repeats: int) -> dict:
    text = harness.tokenizer()(samples.sample_text(), return_tensors="pt")["input_ids"]
    channel, same = Pipe(connection), 0
    times = {name: [] for name in ("single", "two", "transfer")}
    for repeat in range(repeats + 1):
        ids = text[:, repeat * tokens : (repeat + 1) * tokens]
        start = time.perf_counter()
        cache = hf_efficient.PagedCache(model.config)
        read(model, cache, ids[:, :-1])
        expected = read(model, cache, ids[:, -1:])
        single = time.perf_counter() - start

        start = time.perf_counter()
        channel.put({"ids": ids[0, :-1].tolist()})
        cache = hf_efficient.PagedCache(model.config)
        cache.receive(connection, model)
        same += read(model, cache, ids[:, -1:]) == expected
        two = time.perf_counter() - start

        blob = torch.zeros(
            cache.num_used_blocks * cache.layers[0].store.pages["keys"][0].nbytes * 2 * len(cache.layers)
        )
        blob = blob.to(torch.uint8)
        channel.put({"bytes": len(blob)})
        channel.get()
        start = time.perf_counter()
        channel.get_tensor(blob)
        transfer = time.perf_counter() - start
        if repeat:  # after a round to warm up
            for name, seconds in (("single", single), ("two", two), ("transfer", transfer)):
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "tokens": tokens,
        "megabytes": round(len(blob) / 1e6, 1),
        "milliseconds": harness.milliseconds(times, statistics.median, 1),
        "quartiles": harness.milliseconds(times, harness.quartiles, 1),
        "gigabytes_per_second": round(len(blob) / median["transfer"] / 1e9, 2),
        "ratio": round(median["two"] / (median["single"] + median["transfer"]), 3),
        "same_first_token": f"{same} of {repeats + 1}",
    }
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    parser = harness.parser(__doc__, "prefill_decode.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=prefill_process, args=(there, options.threads))
    process.start()
    model, channel = load(), Pipe(here)
    channel.get()
    records = [measure(model, here, tokens, options.repeats) for tokens in options.tokens]
    channel.put({})
    process.join()
    harness.write(
        options.output,
        {
            "question": "milliseconds to the first token of a process that decodes what another one read",
            "model": samples.SAMPLE_MODEL,
            "environment": environment.describe(),
            "load_average": os.getloadavg(),
            "repeats": options.repeats,
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
