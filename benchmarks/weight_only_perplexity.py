"""Does weight-only quantization keep the perplexity of SmolLM2-135M-Instruct?

    python benchmarks/weight_only_perplexity.py [--tokens FILE] [--rows 24] [--output benchmarks/results/...json]

Without --tokens the windows are the first 24 of 1,024 tokens of `sample_text()`; FILE is an int64 [rows, length] tensor (a
.safetensors file with one tensor, or a .pt file, read without unpickling objects). Every row of the table is loaded
through `from_pretrained(quantization_config=...)`; differences to bf16 are paired by window.
"""

import argparse
import gc
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import WeightOnlyConfig
from hf_efficient.evaluation import environment, memory, perplexity, samples


CONFIGS = {
    "int8 per channel symmetric": dict(bits=8, group_size=-1, symmetric=True),
    "int4 group 32 asymmetric": dict(bits=4, group_size=32),
    "int4 group 64 asymmetric": dict(bits=4, group_size=64),
    "int4 group 128 asymmetric": dict(bits=4, group_size=128),
    "int4 group 64 symmetric (full grid)": dict(bits=4, group_size=64, symmetric=True),
}


def load_tokens(path: str | None, model: Path, rows: int) -> torch.Tensor:
    if path is None:
        return perplexity.windows(AutoTokenizer.from_pretrained(model), samples.sample_text(), rows, 1024)
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return next(iter(load_file(path).values()))[:rows]
    return torch.load(path, weights_only=True)[:rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--output", default="benchmarks/results/weight_only_perplexity.json")
    options = parser.parse_args()

    model_path = samples.sample_model()
    tokens = load_tokens(options.tokens, model_path, options.rows)
    results, reference = [], None
    for name, arguments in {"bf16": None, **CONFIGS}.items():
        config = {"quantization_config": WeightOnlyConfig(**arguments)} if arguments else {}
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, **config)
        nll = perplexity.negative_log_likelihood(model, tokens)
        reference = nll if reference is None else reference
        difference, error = perplexity.paired_difference(nll, reference)
        results.append(
            {
                "name": name,
                "config": arguments,
                "perplexity": perplexity.perplexity(nll),
                "nll_difference": difference,
                "nll_difference_standard_error": error,
                "weight_bytes": memory.weight_bytes(model),
            }
        )
        print(json.dumps(results[-1]), flush=True)
        del model
        gc.collect()
    content = {"environment": environment.describe(), "tokens": list(tokens.shape), "results": results}
    Path(options.output).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
