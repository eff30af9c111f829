"""Prompts that a chat model writes itself."""

import torch
from transformers import GenerationConfig

from hf_efficient.generation.decode import speculative_generate
from hf_efficient.generation.speculation.options import Speculation
from hf_efficient.generation.training.recorder import Recorder


MARK = "\N{SNOWMAN}"
LONGEST = 64  # tokens of a prompt


def own_prompts(model, tokenizer, count: int, seed: int) -> list[str]:
    """What the model continues the beginning of a user's turn with, sampled from its 50 likeliest tokens: questions like those it
    was trained on (Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing").

    Returns at most `count` different prompts: those of `count` that end within `LONGEST` tokens. None without a chat template or
    an end of turns.
    """
    end = model.generation_config.eos_token_id
    if tokenizer.chat_template is None or end is None:
        return []
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer([turn.partition(MARK)[0]] * count, return_tensors="pt", add_special_tokens=False).to(
        model.device
    )
    settings = GenerationConfig(
        do_sample=True, top_k=50, max_new_tokens=LONGEST, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = model.generate(
            **inputs,
            generation_config=settings,
            custom_generate=speculative_generate,
            draft_model=Speculation(Recorder(), adaptive=False),  # rows that end leave the batch
        )[:, inputs["input_ids"].shape[1] :]
    ended = torch.isin(written, torch.tensor(end, device=written.device)).any(1).tolist()
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    return list(dict.fromkeys(text.strip() for text, whole in zip(texts, ended) if whole and text.strip()))
