"""A checkpoint larger than the memory allowed is compressed from disk to disk by GPTQ, and again with five kills.

    python benchmarks/disk_to_disk.py --folder FOLDER

A random Llama-shaped checkpoint of --layers blocks is written to FOLDER. `compress_on_disk` runs on it in a process of
its own whose private memory the system bounds (RLIMIT_DATA: heap, anonymous and private writable mappings; an
allocation beyond it fails). The bound is a third of the checkpoint. "peak" is the largest sum of anonymous memory that
was seen (RssAnon of /proc, every 20 ms), "resident" that of all resident pages, those of mapped files among them, which
the system may take back. Then the same run is killed --kills times by SIGKILL at random moments, and ends with the same
bytes in every file. A second call with the same folder goes on after the run in one go.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_efficient.evaluation import environment


SAMPLES, LENGTH = 8, 128
MAPPED_FROM = "MALLOC_MMAP_THRESHOLD_"  # glibc: larger buffers are mappings, whose address space freeing gives back


def make(folder: Path, layers: int) -> int:
    """Writes the checkpoint, one shard a block; returns its bytes."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8_000,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="50MB")
    return _bytes(folder)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def compress(model: str, output: str, allowed: int) -> None:
    """What the bounded process does. allowed: bytes of private memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    from hf_efficient import CalibrationConfig, WeightOnlyConfig
    from hf_efficient.compression.disk_to_disk import compress_on_disk

    tokens = torch.randint(8_000, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    calibration = CalibrationConfig(tokens=tokens)
    config = WeightOnlyConfig(bits=4, group_size=64, method="gptq", calibration=calibration)
    found = compress_on_disk(model, output, config, memory=allowed)
    print(json.dumps({"planned": found.memory, "states": found.states}), flush=True)


def watched(command: list[str], kill_after: float | None = None) -> dict:
    """Runs `command`; returns its seconds, last line, and largest memory in bytes, by kind."""
    start, peak, resident = time.perf_counter(), 0, 0
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {MAPPED_FROM: "1000000"}
    )
    while process.poll() is None:
        try:
            lines = dict(line.split(":") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if "RssAnon" in lines:
            peak = max(peak, int(lines["RssAnon"].split()[0]) << 10)
            resident = max(resident, int(lines["VmRSS"].split()[0]) << 10)
        if kill_after is not None and time.perf_counter() - start > kill_after:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    out, errors = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(errors[-3000:])
    return {
        "seconds": time.perf_counter() - start,
        "peak": peak,
        "resident": resident,
        "killed": process.returncode != 0,
        "last": out.strip().rpartition("\n")[2],
    }


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> None:
    parser = harness.parser(__doc__, "disk_to_disk.json")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=72)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compress", nargs=3, help=argparse.SUPPRESS)  # what the bounded process is called with
    options = parser.parse_args()
    if options.compress:
        model, output, allowed = options.compress
        return compress(model, output, int(allowed))
    source, first = options.folder / "source", options.folder / "whole.json"
    size = make(source, options.layers) if not source.is_dir() else _bytes(source)
    allowed = size // 3

    def command(output: Path) -> list[str]:
        given = ["--folder", str(options.folder), "--compress", str(source), str(output), str(allowed)]
        return [sys.executable, __file__, *given]

    if not first.is_file():
        harness.write(first, watched(command(options.folder / "whole")))
    whole = harness.read(first, {})
    print(f"checkpoint {size / 1e6:.0f} MB, allowed {allowed / 1e6:.0f} MB: {whole}", flush=True)
    draw, kills, output = random.Random(options.seed), [], options.folder / "killed"
    longest = whole["seconds"] / (options.kills + 1) * 1.3
    while len(kills) < options.kills:
        found = watched(command(output), draw.uniform(0.5 * longest, longest))
        if not found["killed"]:
            sys.exit("the run ended before it was killed often enough: give more --layers")
        done = sorted(path.name for path in (options.folder / ".killed.compressing" / "checkpoint").glob("model-*"))
        kills.append({"after": found["seconds"], "shards": len(done)})
        print(kills[-1], flush=True)
    last = watched(command(output))
    same = digests(options.folder / "whole") == digests(output)
    loaded = AutoModelForCausalLM.from_pretrained(output)
    record = {
        "environment": environment.describe(),
        "checkpoint_bytes": size,
        "allowed_bytes": allowed,
        "ratio": size / allowed,
        "tokens": SAMPLES * LENGTH,
        "whole": whole,
        "kills": kills,
        "last": last,
        "same_bytes": same,
        "loads": bool(torch.isfinite(loaded(torch.arange(8)[None]).logits).all()),
    }
    harness.write(options.output, harness.rounded(record))
    print(record)


if __name__ == "__main__":
    main()
