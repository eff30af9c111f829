"""Runs tasks of lm-evaluation-harness on a quantized model, beside the model it was made from.

pip install lm_eval
python examples/evaluate_lm_eval.py --tasks arc_easy
"""

import argparse

import lm_eval
import torch
from lm_eval.tasks import TaskManager

import hf_efficient.integrations.lm_eval  # noqa: F401  (adds the harness's model "hf-efficient")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--tasks", nargs="+", default=["arc_easy"])
parser.add_argument("--include-path", help="a folder with tasks of your own; these need no network")
parser.add_argument("--limit", type=int, help="of the samples of a task")
options = parser.parse_args()
tasks = dict(tasks=options.tasks, task_manager=TaskManager(include_path=options.include_path), limit=options.limit)
device = "cuda" if torch.cuda.is_available() else "cpu"  # the harness's default is "cuda"

for name, arguments in (("hf", ""), ("hf-efficient", ",bits=4,group_size=64")):
    found = lm_eval.simple_evaluate(
        model=name, model_args=f"pretrained={options.model}{arguments}", device=device, **tasks
    )
    print(name, found["results"])
