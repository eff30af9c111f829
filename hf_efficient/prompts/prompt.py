"""What a prompt is made of: the parts of its text that may lose words, and the rest, which stays."""

import re
from dataclasses import dataclass, field, replace


_SURROGATE = re.compile("[\ud800-\udfff]")
SEGMENTS = ("instruction", "demonstrations", "documents", "question")
SHORTENED_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Part:
    """Characters `start` to `end - 1` of a prompt, which may lose words.

    Attributes:
        kind: "instruction", "demonstration", "document", or "text", which is several documents in one.
    """

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, and in its order the parts that may lose words.

    Attributes:
        messages: of a chat; else none.
        contents: for each message the characters (start, end) of its content in `text`.
    """

    text: str
    parts: list[Part]
    question: str | None = None
    messages: list[dict] = field(default_factory=list)
    contents: list[tuple[int, int]] = field(default_factory=list)


def read(prompt, question: str | None, tokenizer) -> Prompt:
    """Takes a text, a mapping of `SEGMENTS` or the messages of a chat apart.

    Raises:
        TypeError: for anything else.
        ValueError: where it holds no text or half of a character, or a template does not hold the messages as they are.
    """
    if question is not None and not isinstance(question, str):
        raise TypeError(f"question={question!r} is no text")
    if question is not None and not question.strip():
        raise ValueError(f"question={question!r} holds no text: leave it out, or ask something")
    if isinstance(prompt, str):
        found = Prompt(prompt, [Part("text", 0, len(prompt))], question)
    elif isinstance(prompt, dict):
        found = _read_segments(prompt, question)
    elif isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        found = _read_chat(prompt, question, tokenizer)
    else:
        raise TypeError(
            f"prompt is {type(prompt).__name__}: give a text, a dict with some of {SEGMENTS}, the messages of a chat, "
            "or a list of these"
        )
    if not found.text.strip():
        raise ValueError(f"prompt={prompt!r} holds no text")
    for name, text in (("prompt", found.text), ("question", found.question or "")):
        if surrogate := _SURROGATE.search(text):
            raise ValueError(f"{name} has {surrogate[0]!r}, half of a character, which no tokenizer reads")
    return _without_question(found)


def _read_segments(prompt: dict, question: str | None) -> Prompt:
    if unknown := set(prompt) - set(SEGMENTS):
        raise ValueError(f"prompt has the segments {sorted(unknown)}: allowed are {SEGMENTS}")
    if question is not None and prompt.get("question", question) != question:
        raise ValueError(f"question={question!r} and prompt['question']={prompt['question']!r} are two questions")
    pieces = []
    for name in SEGMENTS:
        value, is_list = prompt.get(name), name in ("demonstrations", "documents")
        values = (value if isinstance(value, list | tuple) else [None]) if is_list else [value]
        if value is not None and not all(isinstance(text, str) for text in values):
            raise TypeError(f"prompt[{name!r}] is {value!r}: give {'a list of texts' if is_list else 'a text'}")
        pieces += [(name.removesuffix("s"), text) for text in values if text]
    text, parts = "", []
    for kind, piece in pieces:
        text += "\n\n" * bool(text)
        parts += [Part(kind, len(text), len(text) + len(piece))] * (kind != "question")
        text += piece
    return Prompt(text, parts, question or prompt.get("question") or None)


def _read_chat(messages: list[dict], question: str | None, tokenizer) -> Prompt:
    """The chat as the tokenizer's template renders it; without a template, the contents joined by blank lines."""
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TypeError(f"message {index} is {message!r}: give it a role and a content, both texts")
    texts = [message["content"] for message in messages]
    if tokenizer.chat_template:
        marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
        marked = tokenizer.apply_chat_template(
            [{**message, "content": mark} for message, mark in zip(messages, marks)], tokenize=False
        )
        between, rest = [], marked
        for mark in marks:
            before, found, rest = rest.partition(mark)
            between.append(before)
            if not found:
                raise ValueError(
                    f"the chat template of {type(tokenizer).__name__} leaves messages out or reorders them"
                )
        between.append(rest)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        if rendered != _joined(between, texts):
            texts = [text.strip() for text in texts]  # as many templates do
        if rendered != _joined(between, texts):
            raise ValueError(
                "the chat template changes what messages say, so no part of it can be left out safely: compress the "
                "contents one by one"
            )
    else:
        between = ["", *["\n\n"] * (len(texts) - 1), ""]
    contents, at = [], 0
    for before, text in zip(between, texts):
        at += len(before)
        contents.append((at, at + len(text)))
        at += len(text)
    parts = [
        Part("text", start, end)
        for message, (start, end) in zip(messages, contents)
        if message["role"] in SHORTENED_ROLES and start < end
    ]
    return Prompt(_joined(between, texts), parts, question, messages, contents)


def _joined(between: list[str], texts: list[str]) -> str:
    return "".join(before + text for before, text in zip(between, [*texts, ""]))


def _without_question(prompt: Prompt) -> Prompt:
    """Cuts the question off the parts that begin or end with it. In the middle of one it belongs to its passage."""
    if prompt.question is None:
        return prompt
    parts, question = [], prompt.question.strip()
    for part in prompt.parts:
        start, end = part.start, part.end
        text = prompt.text[start:end]
        if text.rstrip().endswith(question):
            end = start + len(text.rstrip()) - len(question)
        elif text.lstrip().startswith(question):
            start = end - len(text.lstrip()) + len(question)
        parts += [replace(part, start=start, end=end)] * (end > start)
    return replace(prompt, parts=parts)
