"""Quantizes a model while loading it, then answers a question.

python examples/quantize_and_chat.py --bits 4 --quality balanced
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import WeightOnlyConfig


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--bits", type=int, default=4)
parser.add_argument("--quality", choices=("fast", "balanced", "best"), default="fast")
parser.add_argument("--question", default="What is the capital of France?")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
config = WeightOnlyConfig(bits=options.bits, quality=options.quality)
model = AutoModelForCausalLM.from_pretrained(options.model, quantization_config=config)

chat = [{"role": "user", "content": options.question}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=options.max_new_tokens, do_sample=False)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
