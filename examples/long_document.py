"""Asks several questions about one document. Its pages are computed once and stored in 8 bits.

python examples/long_document.py --document report.txt "Who wrote it?" "When?"
"""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient import PagedCache, PrefixCache, WeightOnlyConfig


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--document", required=True, help="a text file")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("questions", nargs="+")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(
    options.model, quantization_config=WeightOnlyConfig(bits=4), attn_implementation="flash_paged"
)
prefix = PrefixCache(model, memory="500MB", kv_format="int8")
document = Path(options.document).read_text()

for question in options.questions:
    prompt = tokenizer(f"{document}\n\nQuestion: {question}\nAnswer:", return_tensors="pt")
    cache = PagedCache(model.config, prefix_cache=prefix, kv_format="int8")
    start = time.perf_counter()
    output = model.generate(**prompt, past_key_values=cache, max_new_tokens=options.max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{question} ({time.perf_counter() - start:.2f} s)\n{answer}\n")
print(prefix.stats())
