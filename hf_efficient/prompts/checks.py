"""Checks of the arguments of `PromptCompressor.compress`, before work starts."""

from hf_efficient.prompts.groups import Group
from hf_efficient.prompts.prompt import Prompt
from hf_efficient.prompts.tokens import Word


def check_budget(keep, tokens) -> None:
    """Raises unless exactly one of `keep` and `tokens` is given, and valid."""
    if (keep is None) == (tokens is None):
        raise ValueError(f"keep={keep!r} and tokens={tokens!r}: give one of them")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | float)):
        raise TypeError(f"keep={keep!r} is no number")
    if keep is not None and not 0 < keep <= 1:
        raise ValueError(f"keep={keep!r} is not above 0 and at most 1: it is the share of the tokens that stays")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
        raise TypeError(f"tokens={tokens!r} is no whole number")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens={tokens!r} is not at least 1")


def check_words(keep_words) -> None:
    """Raises unless `keep_words` is a collection of texts that are not empty."""
    if not isinstance(keep_words, list | tuple | set | frozenset):
        raise TypeError(f"keep_words={keep_words!r} is {type(keep_words).__name__}: give a list of texts")
    for word in keep_words:
        if not isinstance(word, str):
            raise TypeError(f"keep_words has {word!r}: each is a text")
        if not word:
            raise ValueError("keep_words has an empty text")


def is_chat(prompt: list) -> bool:
    """Whether a list holds the messages of one chat, not several prompts."""
    return bool(prompt) and all(isinstance(message, dict) and "role" in message for message in prompt)


def check_batch(prompt: list, question) -> list[str | None]:
    """The question of each prompt."""
    if not prompt:
        raise ValueError("prompt is an empty list")
    if not isinstance(question, list | tuple):
        return [question] * len(prompt)
    if len(question) != len(prompt):
        raise ValueError(f"question has {len(question)} texts for {len(prompt)} prompts")
    return list(question)


def check_question(prompt: Prompt, reorder: bool, groups: list[Group], is_classifier: bool) -> None:
    """Raises ValueError for `reorder` or a question that this model or prompt does not support."""
    if reorder and (is_classifier or prompt.question is None or not any(g.kind == "document" for g in groups)):
        raise ValueError("reorder=True needs a causal language model, a question, and a prompt with documents")
    if is_classifier and prompt.question is not None and prompt.question.strip() not in prompt.text:
        raise ValueError(
            f"question={prompt.question!r} does not stand in the prompt, and a token classifier reads nothing else: "
            "leave it out, or take a causal language model"
        )


def budget_of(
    groups: list[Group],
    words: list[Word],
    forced: set[int],
    total: int,
    keep: float | None,
    tokens: int | None,
    shortest: int,
) -> int:
    """How many tokens of the parts stay, `forced` among them. shortest: tokens of the shortest word."""
    inside = [index for group in groups if group.kind is not None for index in group.words]
    droppable = sum(len(words[index]) for index in inside)
    must = sum(len(words[index]) for index in inside if index in forced)
    if keep is not None:
        return max(round(keep * droppable), must, min(1, droppable))
    if tokens > total:
        raise ValueError(f"tokens={tokens}, but the prompt has {total}")
    if tokens < total - droppable + must:
        raise ValueError(
            f"tokens={tokens}, but {total - droppable + must} of the prompt's {total} always stay: the question, "
            "system messages, the chat template, special tokens and keep_words"
        )
    if tokens < shortest:
        raise ValueError(f"tokens={tokens}, but the shortest word of the prompt has {shortest}, and words stay whole")
    return tokens - (total - droppable)
