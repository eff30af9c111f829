"""The memory that `compress_on_disk` takes for a checkpoint three times as large as it may take, under a limit of the
system. Writes benchmarks/results/disk_to_disk.json.

    python benchmarks/disk_to_disk.py [--memory 600MB] [--times 3] [--kills 5] [--output FILE]

The checkpoint is random and Llama-shaped, in bfloat16, with as many layers as make it `--times` as large as `--memory`.
It is compressed to int4 by GPTQ, in a process whose private memory the system bounds (`RLIMIT_DATA`) by `--memory`:
what is beyond it raises MemoryError. `data`: the most private memory that the process had (VmData), `resident`: the
most that was resident without pages of files (RssAnon), both sampled every 10 ms. With `--kills` the process is killed
so many times, at random moments, and goes on; shards must then have the same bytes as those of a run in one go.
"""

import hashlib
import json
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


SHAPE = dict(hidden_size=512, intermediate_size=1344, num_attention_heads=8, num_key_value_heads=4, vocab_size=2048)
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
    """What the measured process does."""
    from hf_efficient import CalibrationConfig, WeightOnlyConfig, compress_on_disk

    limit = parse_bytes("memory", memory)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.RLIM_INFINITY))  # of threads: 8 MB each count else
    tokens = torch.randint(0, SHAPE["vocab_size"], (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    calibration = CalibrationConfig(tokens=tokens, batch_size=1)
    config = WeightOnlyConfig(bits=4, group_size=64, method="gptq", calibration=calibration)
    plan = compress_on_disk(model, output, config, memory)
    print(json.dumps({"planned": plan.memory, "disk": plan.disk}))


def follow(arguments: list[str], stop=lambda: False) -> tuple[dict[str, int], int, str]:
    """Runs `compress` in a process: (the largest VmData and RssAnon in bytes, its status, what it printed last). It is
    killed when `stop()` holds."""
    command = [sys.executable, __file__, "--child", *arguments]
    child, most = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), {"VmData": 0, "RssAnon": 0}
    while child.poll() is None:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
        except ProcessLookupError:
            break
        for name, size in re.findall(r"(VmData|RssAnon):\s+(\d+) kB", status):
            most[name] = max(most[name], int(size) << 10)
        if stop():
            child.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    out, _ = child.communicate()
    return most, child.returncode, out.strip().rpartition("\n")[2]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.suffix == ".safetensors"}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return compress(*sys.argv[2:])
    parser = harness.parser(__doc__, "disk_to_disk.json")
    parser.add_argument("--memory", default="600MB")
    parser.add_argument("--times", type=float, default=3)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    allowed = parse_bytes("memory", options.memory)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        size = write_checkpoint(model, int(options.times * allowed))
        start = time.perf_counter()
        most, status, said = follow([str(model), f"{scratch}/whole", options.memory])
        seconds = time.perf_counter() - start
        if status:
            done = len(list(Path(scratch).glob(".whole.compressing/checkpoint/model-*")))
            sys.exit(f"ended with {status} after {done} shards, at {most}")
        record = {"environment": environment.describe(), "allowed": allowed, "checkpoint": size, "seconds": seconds}
        record |= {"data": most["VmData"], "resident": most["RssAnon"], "kills": options.kills, **json.loads(said)}
        record["shape"] = SHAPE | {"layers": json.loads((model / "config.json").read_text())["num_hidden_layers"]}
        print(record)
        harness.write(options.output, record)


if __name__ == "__main__":
    main()
