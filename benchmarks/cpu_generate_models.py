"""The models that benchmarks/cpu_generate.py measures, and their prompts."""

import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_efficient.evaluation import samples


LLAMA_1B = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
LLAMA_1B |= dict(num_hidden_layers=16, vocab_size=32000, tie_word_embeddings=True, max_position_embeddings=4096)
TINY = dict(LLAMA_1B, hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1)
TINY |= dict(num_hidden_layers=2, vocab_size=256)
MODELS = {"smollm2": None, "1b": LLAMA_1B, "tiny": TINY}  # shapes of random ones; "tiny" tests the script


def folder_of(model: str, temporary: str) -> str:
    """Where `model` lies; a random one is written to `temporary`."""
    if MODELS[model] is None:
        return str(samples.sample_model())
    torch.manual_seed(0)
    random_model = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[model]), dtype=torch.bfloat16)
    random_model.save_pretrained(temporary)
    return temporary


class Texts:
    """The prompts of a model: `rows` as token ids, `copying` one by one."""

    def __init__(self, model: str, folder: str):
        self.tokenizer = None
        if model == "smollm2":
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.ids = self.tokenizer(samples.sample_text()[:100_000])["input_ids"]
        else:
            draw, vocabulary = random.Random(0), MODELS[model]["vocab_size"]
            self.ids = [draw.randrange(vocabulary) for _ in range(8192)]

    def rows(self, batch: int, prompt: int) -> list[list[int]]:
        return [self.ids[row * 1024 :][:prompt] for row in range(batch)]

    def copying(self) -> list[list[int]]:
        from speculation_texts import copying

        chats = [[{"role": "user", "content": prompt}] for prompt in copying()]
        return [self.tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
