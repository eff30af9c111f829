"""Time and memory of calibration on a larger model: a random Llama with the shapes of a 1B model.

    python benchmarks/calibrate_1b.py [--method gptq] [--windows 16] [--blocks 16] [--output FILE]

The weights are random, so nothing is said about quality; the code path is that of `from_pretrained` with calibration.
"""

import json
import tempfile
import time
from pathlib import Path

import harness
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_efficient
from hf_efficient.evaluation import environment, memory


def main() -> None:
    parser = harness.parser(__doc__, "calibrate_1b.json")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--refine", action="store_true")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=16)
    options = parser.parse_args()
    shape = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    config = LlamaConfig(**shape, num_hidden_layers=options.blocks, vocab_size=32000, tie_word_embeddings=True)
    torch.manual_seed(0)
    tokens = torch.randint(0, 32000, (options.windows, 512))
    calibration = hf_efficient.CalibrationConfig(tokens=tokens)
    scheme = dict(bits=4, group_size=64, method=options.method, refine=options.refine)
    quantization = hf_efficient.WeightOnlyConfig(**scheme, calibration=calibration)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder)
        del model
        transformers.logging.set_verbosity_error()
        start = time.perf_counter()
        model = harness.load(folder, quantization_config=quantization)
        seconds = time.perf_counter() - start
        model.save_pretrained(Path(folder) / "quantized")
        again = harness.load(Path(folder) / "quantized")
        same = torch.equal(model(tokens[:1, :8]).logits, again(tokens[:1, :8]).logits)
    result = {
        "environment": environment.describe(),
        "config": {**scheme, "windows": options.windows, "blocks": options.blocks},
        "parameters": parameters,
        "seconds": seconds,
        "peak_memory_bytes": memory.peak_memory_bytes(torch.device("cpu")),
        "dense_bytes": 2 * parameters,
        "weight_bytes": memory.weight_bytes(model),
        "reloads_to_the_same_logits": same,
    }
    harness.write(options.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
