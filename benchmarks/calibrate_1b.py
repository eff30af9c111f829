"""Time and memory of quantizing a larger model: a random Llama with the shapes of a 1B model.

    python benchmarks/calibrate_1b.py [--rows "int4 g64 gptq" ...] [--windows 16] [--blocks 16] [--output FILE]

Rows are those of benchmarks/quality.py, each in a process of its own. The weights are random, so nothing is said about
quality; the code path is that of `from_pretrained` with calibration.

All blocks take the same time, and one is compressed at a time. So `--blocks 1` says what 16 take: 16 times the CPU
seconds (what is done once is counted 16 times then), and beside the peak 15 more blocks (`block_bytes` in bfloat16).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import quality
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_efficient.evaluation import environment, memory


def measure(name: str, windows: int, blocks: int) -> dict:
    """The record of one row."""
    shape = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    config = LlamaConfig(**shape, num_hidden_layers=blocks, vocab_size=32000, tie_word_embeddings=True)
    torch.manual_seed(0)
    tokens = torch.randint(0, 32000, (windows, 512))
    arguments = quality.rows()[name]
    quantization = quality.config_of(arguments, tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        block_parameters = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
        model.save_pretrained(folder)
        del model
        transformers.logging.set_verbosity_error()
        start, cpu_start = time.perf_counter(), time.process_time()
        model = harness.load(folder, quantization_config=quantization)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        model.save_pretrained(Path(folder) / "quantized")
        again = harness.load(Path(folder) / "quantized")
        same = torch.equal(model(tokens[:1, :8]).logits, again(tokens[:1, :8]).logits)
    return {
        "environment": environment.describe(),
        "config": {**arguments, "windows": windows, "blocks": blocks},
        "parameters": parameters,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_memory_bytes": memory.peak_memory_bytes(torch.device("cpu")),
        "dense_bytes": 2 * parameters,
        "block_bytes": 2 * block_parameters,
        "weight_bytes": memory.weight_bytes(model),
        "reloads_to_the_same_logits": same,
    }


def main() -> None:
    parser = harness.parser(__doc__, "calibrate_1b.json")
    parser.add_argument("--rows", nargs="*", default=["int4 g64 gptq"], help="names of rows of benchmarks/quality.py")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.output.write_text(json.dumps(measure(options.one, options.windows, options.blocks)))
        return
    done = harness.read(options.output, {})
    for name in harness.matching(quality.rows(), options.rows):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            sizes = ["--windows", str(options.windows), "--blocks", str(options.blocks), "--output", str(result)]
            subprocess.run([sys.executable, __file__, "--one", name, *sizes], check=True)
            done[name] = json.loads(result.read_text())
        harness.write(options.output, done)
        print(name, f"{done[name]['seconds']:.0f} s, {done[name]['peak_memory_bytes'] / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
