"""Trains LoRA adapters over a model in four bits, with transformers' Trainer.

python examples/qlora.py --texts corpus.txt --output adapter
"""

import argparse
from pathlib import Path

import peft
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from hf_efficient import WeightOnlyConfig


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--texts", required=True, help="a text file; each line is a sample")
parser.add_argument("--output", required=True, help="folder for the adapter")
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
lines = [line for line in Path(options.texts).read_text().splitlines() if line.strip()]
samples = [tokenizer(line, truncation=True, max_length=256) for line in lines]

config = WeightOnlyConfig(codebook="nf4", double_quantization=True)
model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=config)
model = peft.prepare_model_for_kbit_training(model)
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
model.print_trainable_parameters()

arguments = TrainingArguments(options.output, max_steps=options.steps, per_device_train_batch_size=2, report_to=[])
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model, arguments, train_dataset=samples, data_collator=collator).train()
model.save_pretrained(options.output)
