"""Quantizes with AWQ on your text and shares the folder, with a card. A path instead of a Hub id makes a folder.

python examples/calibrate_and_push.py --texts corpus.txt --to me/smollm2-awq
"""

import argparse
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import CalibrationConfig, WeightOnlyConfig
from hf_efficient.cli import main
from hf_efficient.files import why_not_new


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--texts", required=True, help="a text file like what the model will read")
parser.add_argument("--to", required=True, help="a Hub id, or a path such as ./shared")
parser.add_argument("--windows", type=int, default=32)
parser.add_argument("--sequence-length", type=int, default=512)
options = parser.parse_args()
if options.to.startswith(("/", ".", "~")) and (reason := why_not_new(Path(options.to).expanduser())):
    parser.error(f"--to {options.to} {reason}")

calibration = CalibrationConfig(
    dataset=options.texts, num_samples=options.windows, sequence_length=options.sequence_length
)
config = WeightOnlyConfig(bits=4, group_size=64, method="awq", calibration=calibration)
model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=config)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(folder)
    raise SystemExit(main(["push", folder, options.to, "--base-model", options.model]))
