"""The memory that `compress_on_disk` takes for a checkpoint that is larger, under a limit of the system. Writes
benchmarks/results/disk_to_disk.json.

    python benchmarks/disk_to_disk.py [--memory 500MB] [--checkpoint 1500MB] [--kills 5] [--output FILE]

The checkpoint is random and Llama-shaped, in bfloat16, with as many layers as make it `--checkpoint` large. It is
compressed to int4 by GPTQ, in a process whose private memory the system bounds (`RLIMIT_DATA`) by `--memory`: what is
beyond it raises an error. `imported`: private memory (VmData) of the process when everything is imported, before it
begins. `data`: the most that it had later, `resident`: the most of it that was resident (RssAnon), both sampled every
10 ms. `times`: the checkpoint beside the limit. Threads get stacks of 1 MB, as each counts
in full.

Then the same is done again, by processes that are killed (`kill -9`) at random moments of the time that the first run
took, `--kills` of them, and one that goes on to the end. `killed_after`: seconds, and the blocks that were written by
then. The bits of every file are compared with those of the first run.
"""

import functools
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.evaluation import environment


SHAPE = dict(hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, vocab_size=2048)
SAMPLES, LENGTH = 4, 256


def write_checkpoint(folder: Path, size: int) -> int:
    """Writes a random checkpoint of at least `size` bytes, layer by layer; returns its bytes."""
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["hidden_size"] // 2
    generator = torch.Generator().manual_seed(0)

    def random_weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    places, written, layer = {}, 0, 0

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal written
        save_file(tensors, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        written += sum(tensor.nbytes for tensor in tensors.values())

    outside = {
        f"{name}.weight": random_weight(SHAPE["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")
    }
    write("model-outside.safetensors", outside | {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})
    while written < size:
        prefix, tensors = f"model.layers.{layer}", {}
        for part, weights in (("self_attn", attention), ("mlp", mlp)):
            tensors |= {f"{prefix}.{part}.{name}.weight": random_weight(*shape) for name, shape in weights.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        write(f"model-{layer:05}.safetensors", tensors)
        layer += 1
    config.num_hidden_layers = layer
    config.save_pretrained(folder)
    index = {"metadata": {"total_size": written}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return written


def compress(model: str, output: str, memory: str) -> None:
    """What the measured process does. Prints the plan and what it had imported."""
    from hf_efficient import CalibrationConfig, WeightOnlyConfig, compress_on_disk

    imported = private(os.getpid())["VmData"]
    limit = parse_bytes("memory", memory)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tokens = torch.randint(0, SHAPE["vocab_size"], (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    calibration = CalibrationConfig(tokens=tokens, batch_size=1)
    config = WeightOnlyConfig(bits=4, group_size=64, method="gptq", calibration=calibration)
    plan = compress_on_disk(model, output, config, memory)
    print(json.dumps({"planned": plan.memory, "written": plan.disk, "imported": imported}))


def private(process: int) -> dict[str, int]:
    """VmData and RssAnon of a process, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return {name: int(size) << 10 for name, size in re.findall(r"(VmData|RssAnon):\s+(\d+) kB", status)}


def follow(arguments: list[str], seconds: float = float("inf")) -> tuple[dict[str, int], int, str]:
    """Runs `compress` in a process, killed after `seconds`: (the largest VmData and RssAnon in bytes, its status, what
    it printed last)."""
    stacks = functools.partial(resource.setrlimit, resource.RLIMIT_STACK, (1 << 20, resource.RLIM_INFINITY))
    command, most = [sys.executable, __file__, "--child", *arguments], {"VmData": 0, "RssAnon": 0}
    end = time.perf_counter() + seconds
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=stacks) as child:
        try:
            while child.poll() is None and time.perf_counter() < end:
                for name, size in private(child.pid).items():
                    most[name] = max(most[name], size)
                time.sleep(0.01)
        finally:
            child.kill()
            child.wait()
        return most, child.returncode, child.stdout.read().strip().rpartition("\n")[2]


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def kill_often(model: Path, output: Path, memory: str, kills: int, seconds: float) -> list[tuple[float, int]]:
    """Compresses with `kills` kills, at moments that are random in parts of about `seconds` / `kills` each. Returns the
    seconds of each, and the shards that had been written by then, of all before it."""
    moments, killed = random.Random(0), []
    for _ in range(kills):
        after = moments.uniform(0.2, 1.0) * seconds / kills
        _, status, _ = follow([str(model), str(output), memory], after)
        if status != -signal.SIGKILL:
            sys.exit(f"ended with {status} before it was killed")
        shards = output.with_name(f".{output.name}.compressing") / "checkpoint"
        killed.append((after, len(list(shards.glob("model-*")))))
    _, status, _ = follow([str(model), str(output), memory])
    if status:
        sys.exit(f"ended with {status} after {kills} kills")
    return killed


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return compress(*sys.argv[2:])
    parser = harness.parser(__doc__, "disk_to_disk.json")
    parser.add_argument("--memory", default="500MB")
    parser.add_argument("--checkpoint", default="1500MB")
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    allowed = parse_bytes("memory", options.memory)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        size = write_checkpoint(model, parse_bytes("checkpoint", options.checkpoint))
        start = time.perf_counter()
        most, status, said = follow([str(model), f"{scratch}/compressed", options.memory])
        seconds = time.perf_counter() - start
        if status:
            done = len(list(Path(scratch).glob(".compressed.compressing/checkpoint/model-*")))
            sys.exit(f"ended with {status} after {done} shards, at {most}")
        compressed = sum(path.stat().st_size for path in Path(scratch, "compressed").glob("*.safetensors"))
        killed = kill_often(model, Path(scratch) / "killed", options.memory, options.kills, seconds)
        if options.kills and hashes(Path(scratch) / "killed") != hashes(Path(scratch) / "compressed"):
            sys.exit(f"other bits after kills at {killed}")
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    said = json.loads(said)
    record = {"environment": environment.describe(), "shape": SHAPE | {"layers": layers}, "allowed": allowed}
    record |= {
        "checkpoint": size,
        "compressed": compressed,
        **said,
        "data": most["VmData"],
        "resident": most["RssAnon"],
    }
    record |= {"times": size / allowed, "seconds": seconds, "killed_after": killed}
    print(record)
    harness.write(options.output, harness.rounded(record))


if __name__ == "__main__":
    main()
