"""Writes a quantized model for vLLM (a folder) and for llama.cpp and Ollama (a GGUF file). Nothing is quantized again.

python examples/export_for_other_engines.py --output exported
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import WeightOnlyConfig, export


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--output", type=Path, required=True)
options = parser.parse_args()
targets = {"compressed-tensors": options.output / "vllm", "gguf": options.output / "model.gguf"}
for target in targets.values():
    if target.exists():
        parser.error(f"--output: {target} exists already")

tokenizer = AutoTokenizer.from_pretrained(options.model)
config = WeightOnlyConfig(bits=4, group_size=64, symmetric=True)
model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=config)

options.output.mkdir(parents=True, exist_ok=True)
for format, target in targets.items():
    written = export(model, target, format=format, tokenizer=tokenizer)
    print(f"{target}: for {', '.join(written.engines)}; rounding {written.rounding:.2g}")
