"""A prompt as tokens whose characters are known, and as the words that are dropped whole."""

import unicodedata
from dataclasses import dataclass


_SPACELESS = ("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ")  # besides those of double width
_STACKERS = "\u1039\u17d2"  # of Burmese and Khmer: the next letter stands below the one before


@dataclass(frozen=True)
class Word:
    """Neighbouring tokens that are kept or dropped together.

    Attributes:
        first, stop: tokens `first` to `stop - 1` of the prompt.
        start, end: their characters in the prompt's text. White space before a word belongs to it.
    """

    first: int
    stop: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.stop - self.first


def tokenize(tokenizer, text: str, cuts: list[int]) -> tuple[list[int], list[Word]]:
    """The token ids of `text` without special tokens, and its words, which are neighbours and cover the text.

    A token that holds characters on both sides of a cut (an offset in the text) joins the words on both sides.
    Tokenizers that give no offsets tokenize each word alone, which may give other ids than for the whole text.
    """
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, ends = found["input_ids"], [end for _, end in found["offset_mapping"]]
    else:
        ids, ends = [], []
        for start, end in _pieces(text, cuts):
            piece = tokenizer.encode(text[start:end], add_special_tokens=False)
            ids += piece
            ends += [end] * len(piece)
    if not ids:
        raise ValueError(f"the prompt {text!r} is no token for {type(tokenizer).__name__}")
    ends[-1] = len(text)
    words, first, start, places = [], 0, 0, set(cuts)
    for token, end in enumerate(ends):
        is_last = token + 1 == len(ends) or ends[token + 1] > end  # of those that hold the character before `end`
        if is_last and end > start and (end in places or _is_boundary(text, end)):
            words.append(Word(first, token + 1, start, end))
            first, start = token + 1, end
    return ids, words


def special_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    found = tokenizer("a", return_special_tokens_mask=True)
    ids, mask = found["input_ids"], found["special_tokens_mask"]
    middle = mask.index(0)
    return ids[:middle], [token for token, special in zip(ids[middle:], mask[middle:]) if special]


def special_ids(tokenizer, text: str) -> set[int]:
    """The ids of the special tokens; that of unknown characters only where `text` spells it."""
    ids, unknown = set(tokenizer.all_special_ids), tokenizer.unk_token
    return ids if unknown is None or unknown in text else ids - {tokenizer.unk_token_id}


def _pieces(text: str, cuts: list[int]) -> list[tuple[int, int]]:
    places = set(cuts)
    ends = [at for at in range(1, len(text)) if at in places or _is_boundary(text, at)] + [len(text)]
    return list(zip([0, *ends], ends))


def _is_boundary(text: str, at: int) -> bool:
    """Whether one word ends and another begins before character `at`. Scripts without spaces are cut anywhere but
    before combining marks and letters that stand below another."""
    if at >= len(text):
        return True
    before, after = text[at - 1], text[at]
    if before.isspace() or after.isspace():  # white space belongs to what follows it, but a line break stands alone
        return before == "\n" and not after.isspace() or not before.isspace()
    if unicodedata.category(after).startswith("M") or before in _STACKERS:
        return False
    return not (_joins(before) and _joins(after))


def _joins(character: str) -> bool:
    if unicodedata.east_asian_width(character) in "WF":
        return False
    if unicodedata.name(character, "").startswith(_SPACELESS):
        return character.isdecimal()
    return character.isalnum() or unicodedata.category(character).startswith("M")


def shortest(words: list[Word], text: str) -> int:
    """Index of the word of the fewest tokens that is not white space alone."""
    return min(
        (index for index, word in enumerate(words) if text[word.start : word.end].strip()),
        key=lambda index: len(words[index]),
    )
