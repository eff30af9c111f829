"""Time of a token where all decoder layers of SmolLM2-135M-Instruct lie on the disk. Writes
benchmarks/results/layer_prefetch.json.

    python benchmarks/layer_prefetch.py [--tokens 8] [--prompt 64] [--output FILE]

The files are dropped from the system's page cache before every token, so that each token reads them from the disk.
Rows: bfloat16 and int4 weights. Columns, in turns, a token at a time: accelerate alone, and with
`LayerPrefetch`; and all weights in memory. `gigabytes_per_second`: the files read once, in order, by themselves.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import harness
import torch
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient.evaluation import environment, samples


ROWS = {
    "bfloat16": (torch.bfloat16, None),
    "int4": (torch.bfloat16, hf_efficient.WeightOnlyConfig(bits=4, group_size=64, method="rtn")),
}


def forget(folder: Path) -> None:
    """Drops the files from the page cache."""
    for path in folder.rglob("*.*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Bytes a second of reading the files."""
    forget(folder)
    start, size = time.perf_counter(), 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while data := file.read(1 << 24):
                size += len(data)
    return size / (time.perf_counter() - start)


@torch.no_grad()
def token(model, ids: torch.Tensor, folder: Path) -> float:
    forget(folder)
    start = time.perf_counter()
    model(ids, use_cache=False)
    return time.perf_counter() - start


def measure(name: str, prompt: int, tokens: int) -> dict:
    dtype, config = ROWS[name]
    ids = harness.tokenizer()(samples.sample_text(), return_tensors="pt")["input_ids"][:, :prompt]
    with tempfile.TemporaryDirectory() as scratch:
        folder, options = Path(scratch) / "model", {"quantization_config": config} if config else {}
        resident = harness.load(dtype=dtype, **options)
        resident.save_pretrained(folder)
        os.sync()
        layers = {f"model.layers.{i}": "disk" for i in range(resident.config.num_hidden_layers)}
        places = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
            **layers,
        }
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map=places, offload_folder=f"{scratch}/offload"
        )
        prefetch, times = hf_efficient.LayerPrefetch(), {"memory": [], "accelerate": [], "prefetch": []}
        for number in range(tokens + 1):
            rows = {"memory": token(resident, ids, folder), "accelerate": token(model, ids, folder)}
            prefetch.attach(model)
            token(model, ids, folder)  # the layer after the last one is the first
            rows["prefetch"] = token(model, ids, folder)
            prefetch.detach()
            if number:  # after a round to warm up
                for column, seconds in rows.items():
                    times[column].append(seconds)
        rate = read(folder)
    median = harness.milliseconds(times, statistics.median, 1)
    record = {
        "weights": name,
        "milliseconds": median,
        "quartiles": harness.milliseconds(times, harness.quartiles, 1),
        "speedup": round(median["accelerate"] / median["prefetch"], 2),
        "gigabytes_per_second": round(rate / 1e9, 2),
    }
    print(record, flush=True)
    return record


def main() -> None:
    parser = harness.parser(__doc__, "layer_prefetch.json")
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = [measure(name, options.prompt, options.tokens) for name in ROWS]
    result = {
        "question": "milliseconds of a forward whose decoder layers lie on the disk",
        "model": samples.SAMPLE_MODEL,
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "prompt": options.prompt,
        "records": records,
    }
    harness.write(options.output, result)


if __name__ == "__main__":
    main()
