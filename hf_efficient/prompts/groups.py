"""The words of a prompt in groups: what stays, and the passages that share the budget."""

import re
from dataclasses import dataclass, replace
from itertools import chain

from hf_efficient.prompts.prompt import Prompt
from hf_efficient.prompts.tokens import Word


SENTENCE_END = re.compile(r"[.!?。！？][\"')\]]*$|\n$")


@dataclass(frozen=True)
class Group:
    """Words, by index, that follow each other. kind: of their part (`Part.kind`); None where they stay."""

    kind: str | None
    words: list[int]


def grouped(prompt: Prompt, words: list[Word], fixed: set[int], split: bool) -> list[Group]:
    """All words in their order. split: whether the sentences of a text are passages of their own."""
    groups, parts = [], iter([*prompt.parts, None])
    part, owner = next(parts), object()
    for index, word in enumerate(words):
        while part is not None and part.end <= word.start:
            part = next(parts)
        inside = part is not None and part.start <= word.start and word.end <= part.end and index not in fixed
        if owner is not (part if inside else None):
            owner = part if inside else None
            groups.append(Group(owner and owner.kind, []))
        groups[-1].words.append(index)
    if not split:
        return groups
    parted = (_passages(prompt.text, words, group) if group.kind == "text" else [group] for group in groups)
    return list(chain.from_iterable(parted))


def _passages(text: str, words: list[Word], group: Group) -> list[Group]:
    passages = [replace(group, words=[])]
    for index in group.words:
        if passages[-1].words and ends_sentence(text, words[passages[-1].words[-1]]):
            passages.append(replace(group, words=[]))
        passages[-1].words.append(index)
    return passages


def ends_sentence(text: str, word: Word) -> bool:
    """Whether `word` ends with the punctuation that ends a sentence."""
    return SENTENCE_END.search(text, word.start, word.end) is not None


def forced_words(prompt: Prompt, words: list[Word], keep_words) -> set[int]:
    """The words that hold a character of the question or of one of `keep_words`. A letter or digit at the edge of these
    ends the word there."""
    patterns = [] if prompt.question is None else [re.escape(prompt.question.strip())]
    patterns += [
        r"(?<!\w)" * bool(re.match(r"\w", word)) + re.escape(word) + r"(?!\w)" * bool(re.search(r"\w$", word))
        for word in keep_words
    ]
    held = bytearray(len(prompt.text))  # by character
    for start, end in (match.span() for pattern in patterns for match in re.finditer(pattern, prompt.text)):
        held[start:end] = b"\1" * (end - start)
    return {index for index, word in enumerate(words) if 1 in held[word.start : word.end]}


def order_of(groups: list[Group], worth: list[float]) -> list[int]:
    """The groups, by index, with the documents in the places where documents stand, by falling worth."""
    places = [index for index, group in enumerate(groups) if group.kind == "document"]
    best = sorted(places, key=lambda index: (-worth[index], index))
    moved = dict(zip(places, best))
    return [moved.get(index, index) for index in range(len(groups))]
