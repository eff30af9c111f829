"""Retrieval from a prompt by a key: what a cache that has lost tokens must still find.

A sentence stands between two others of a Wikipedia text, at depths spread evenly over the prompts. The question comes
after the prompt, so evictions cannot depend on it, and the greedy answer must be right token by token.

- "word": "The secret word of river is anchor.": one to three tokens, most of which the text itself makes plausible.
- "code": "The code of river is 48213.": six tokens, none of which can be guessed.
"""

import random
from collections.abc import Iterator

import torch


WORDS = (
    "apple river candle garden mirror hammer violin rocket turtle bridge castle pepper saddle magnet lantern pillow "
    "anchor basket falcon tunnel helmet orchid dragon ribbon walnut compass barrel canyon feather thunder"
).split()
KINDS = {"word": "The secret word of", "code": "The code of"}


def questions(
    tokenizer, tokens: torch.Tensor, number: int, kind: str = "word", length: int = 1024, seed: int = 0
) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
    """`number` times (prompt int64 [length], question, answer: token ids). tokens: int64 [rows, at least length], text;
    kind: of `KINDS`."""
    for index in range(number):
        generator = random.Random(index + 1000 * seed)
        key, value = generator.sample(WORDS, 2)
        if kind == "code":
            value = "".join(generator.choices("0123456789", k=5))
        sentence = tokenizer.encode(f" {KINDS[kind]} {key} is {value}.")
        text = tokens[index % len(tokens), : length - len(sentence)].tolist()
        ends = [place + 1 for place, token in enumerate(text) if tokenizer.decode([token]).endswith(".")]
        place = min(ends, key=lambda end: abs(end - (index + 0.5) / number * len(text)))
        yield (
            torch.tensor(text[:place] + sentence + text[place:]),
            tokenizer.encode(f"\n\n{KINDS[kind]} {key} is"),
            tokenizer.encode(f" {value}"),
        )
