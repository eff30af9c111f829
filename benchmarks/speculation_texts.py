"""The prompts of benchmarks/speculation.py, and what their answers copy."""

import colorsys
import inspect
import shlex
import statistics
import textwrap

import torch

from hf_efficient.evaluation import samples


RUN = 8  # tokens in a row, by which an answer is known to copy
CHAT = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I think about before I adopt a dog?",
    "Give me three ideas for a birthday party in winter and describe each of them.",
    "How do vaccines work?",
    "Describe a walk through an old city at night.",
    "What is the difference between a virus and a bacterium?",
    "Write a letter to a friend who has just moved to another country.",
)


def copying() -> list[str]:
    news = [story for story in samples.sample_text("news").split("\n\n") if 800 < len(story) < 1300]
    code = [
        textwrap.dedent(inspect.getsource(each)) for each in (textwrap.shorten, colorsys.rgb_to_hls, textwrap.indent)
    ]
    return [
        f"Summarise this text in a few sentences.\n\n{news[7]}",
        f"Which sentences of this text matter most? Quote them.\n\n{news[1]}",
        f"Write this text again and correct its spelling where it is wrong.\n\n{news[2]}",
        f"{news[8]}\n\nWrite the text above again, word for word, with its spelling mistakes corrected.",
        f"Repeat this text with the first sentence left out.\n\n{news[4]}",
        f"Add type annotations to this function and show all of it.\n\n```python\n{code[0]}```",
        f"Output this function with type annotations added. Show all of the code.\n\n```python\n{code[1]}```",
        f"Output this function with type annotations added. Show all of the code.\n\n```python\n{code[2]}```",
    ]


def long_contexts(tokenizer) -> list[str]:
    """Prompts of 1,800 to 2,010 tokens, whose answers end before 2,300."""

    def last(text: str, tokens: int) -> str:
        return tokenizer.decode(tokenizer(text)["input_ids"][-tokens:])

    news = [story for story in samples.sample_text("news").split("\n\n") if 800 < len(story) < 1300]
    others = "\n\n".join(news[20:34])
    code, function = inspect.getsource(shlex), textwrap.dedent(inspect.getsource(colorsys.rgb_to_hls))
    ask = "Output the function {} with type annotations added. Show all of its code."
    spelling = "Write this text again and correct its spelling where it is wrong."
    return [
        f"```python\n{last(code, 1700)}\n\n{function}```\n\n{ask.format('rgb_to_hls')}",
        f"```python\n{last(inspect.getsource(textwrap), 1750)}```\n\n{ask.format('shorten')}",
        f"{last(others, 1740)}\n\n{spelling}\n\n{news[2]}",
    ]


def copied(prompt: list[int], answer: list[int]) -> float:
    """The share of the answer that stands in the prompt within `RUN` tokens in a row."""
    there = {tuple(prompt[i : i + RUN]) for i in range(len(prompt) - RUN + 1)}
    found = [tuple(answer[i : i + RUN]) in there for i in range(len(answer))]
    return statistics.mean(any(found[max(0, i - RUN + 1) : i + 1]) for i in range(len(answer)))


def ceiling(prompt: list[int], answer: list[int]) -> int:
    """The steps that a lookup takes at least for all tokens of the answer but the first."""
    text, at, steps = prompt + answer, len(prompt) + 1, 0
    while at < len(text):
        longest = 0
        for start in range(at):
            length = 0
            while at + length < len(text) and text[start + length] == text[at + length]:
                length += 1
            longest = max(longest, length)
        at += 1 + (longest if longest >= 3 else 0)
        steps += 1
    return steps


def rows_of(ids: torch.Tensor, inputs: dict, end: int) -> list[list[int]]:
    """The generated tokens of each row, up to and with the end of sequence."""
    rows = ids[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def traits_of(batches: list[dict], outputs: list, end: int) -> dict:
    """How much of each plain answer was copied, and its tokens per step at most."""
    shares, most = [], []
    for inputs, output in zip(batches, outputs):
        for ids, mask, answer in zip(inputs["input_ids"], inputs["attention_mask"], rows_of(output, inputs, end)):
            prompt = ids[mask.bool()].tolist()
            shares.append(copied(prompt, answer))
            most.append((len(answer) - 1) / ceiling(prompt, answer))
    return {"copied": shares, "ceiling": most}
