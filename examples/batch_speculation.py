"""Generates for several prompts at once, with drafts looked up in the text, and prints the tokens per forward.

python examples/batch_speculation.py
"""

import argparse
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import BestOf, PromptLookup, TokenRecycling, enable_speculation


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
model = enable_speculation(AutoModelForCausalLM.from_pretrained(options.model, dtype="auto"))
texts = ["Repeat: one two three four. One two three four.", "The colours are red, green, blue; red, green, blue;"]
prompts = tokenizer(texts, return_tensors="pt", padding=True)

for name, drafter in (("plain", None), ("with drafts", BestOf(PromptLookup(), TokenRecycling()))):
    start = time.perf_counter()
    output = model.generate(
        **prompts, assistant_model=drafter, max_new_tokens=options.max_new_tokens, return_dict_in_generate=True
    )
    steps = getattr(output, "tokens_per_step", None) or 1.0
    print(f"{name}: {time.perf_counter() - start:.2f} s, {steps:.2f} tokens per forward")
print(*tokenizer.batch_decode(output.sequences, skip_special_tokens=True), sep="\n")
