"""Prunes half of the weights, trains the rest on the dense model's predictions, and saves the result.

python examples/prune_and_recover.py --texts corpus.txt --minutes 10 --output smollm2-half
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import CalibrationConfig, SparseConfig, recover


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--texts", required=True, help="a text file; each line is a sample")
parser.add_argument("--output", required=True)
parser.add_argument("--windows", type=int, default=32, help="of text, to calibrate with")
parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a window")
parser.add_argument("--minutes", type=float, default=10.0)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
lines = [line for line in Path(options.texts).read_text().splitlines() if line.strip()]
calibration = CalibrationConfig(
    dataset=options.texts, num_samples=options.windows, sequence_length=options.sequence_length
)
config = SparseConfig(sparsity=0.5, method="sparsegpt", calibration=calibration)
sparse = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=config)
dense = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")

print(recover(sparse, dense, lines, tokenizer, minutes=options.minutes, sequence_length=options.sequence_length))
sparse.save_pretrained(options.output)
tokenizer.save_pretrained(options.output)
