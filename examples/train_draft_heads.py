"""Trains draft heads for a model on its own answers, then generates with them.

python examples/train_draft_heads.py --output heads --num-tokens 300000
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import DraftHeads, enable_speculation, train_draft


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--output", required=True)
parser.add_argument("--num-tokens", type=int, default=300_000, help="tokens of the answers that the heads learn from")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--max-new-tokens", type=int, default=256, help="tokens of an answer")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = enable_speculation(AutoModelForCausalLM.from_pretrained(options.model, dtype="auto"))
train_draft(
    model, tokenizer, options.output, num_tokens=options.num_tokens, epochs=options.epochs,
    max_new_tokens=options.max_new_tokens,
)  # fmt: skip

prompt = tokenizer("The capital of France is", return_tensors="pt")
heads = DraftHeads.from_pretrained(options.output)
output = model.generate(**prompt, assistant_model=heads, max_new_tokens=32, return_dict_in_generate=True)
print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
print(f"{output.tokens_per_step:.2f} tokens per forward")
