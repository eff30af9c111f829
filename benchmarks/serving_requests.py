"""The requests of benchmarks/serving.py: their prompts, their lengths and when they come."""

import random


def workload(count: int, shared: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of each request; the first `shared` tokens of all prompts are the same."""
    draw = random.Random(seed)
    prefix = [draw.randrange(100, 40000) for _ in range(shared)]
    sizes = [(draw.randint(16, 256), draw.randint(16, 128)) for _ in range(count)]
    return [(prefix + [draw.randrange(100, 40000) for _ in range(length)], new) for length, new in sizes]


def chats(kind: str, folder: str) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of each prompt of benchmarks/speculation.py of a kind, as a chat."""
    import speculation_texts
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = speculation_texts.copying() if kind == "copying" else speculation_texts.CHAT
    asked = [[{"role": "user", "content": text}] for text in texts]
    return [(tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"], 128) for each in asked]


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start; all at 0 without a rate (requests a second)."""
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate) if rate else 0.0
        times.append(now)
    return times
