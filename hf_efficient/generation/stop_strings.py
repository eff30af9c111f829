"""Strings that end a request, and text that is cut where one begins."""

import functools


_LEADING = 4  # tokens before a stop string may hold bytes of a character, or a space that decoding strips


class StopStrings:
    """Tells the token that completes one of `strings`, as `generate(stop_strings=..., tokenizer=...)` does.

    Args:
        strings: one, or a list of them.
        tokenizer: of the model.
        of_answer: whether a stop string may neither begin in the prompt nor care for special tokens within, as clients
            of a server see texts. In `generate()` it may begin in the prompt, and special tokens are text.

    Raises ValueError for what is no string, for none and for an empty one, and where there is no tokenizer.
    """

    def __init__(self, strings: str | list[str], tokenizer, of_answer: bool = False):
        given = [strings] if isinstance(strings, str) else strings
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) and one for one in given or [""]):
            raise ValueError(f"stop_strings={strings!r}: must be a string, or a list of strings, none of them empty")
        self.strings = tuple(given)
        if not hasattr(tokenizer, "decode"):
            raise ValueError(f"stop_strings need the model's tokenizer: tokenizer={tokenizer!r} is none")
        fast = getattr(tokenizer, "backend_tokenizer", None)  # decodes 16 tokens in 1 us, and not in 12
        options = {} if fast else {"clean_up_tokenization_spaces": False}
        self._decode, self.of_answer = functools.partial((fast or tokenizer).decode, **options), of_answer
        self.tokens = max(len(string.encode()) for string in self.strings) + _LEADING  # of a text that may hold one

    def __deepcopy__(self, memo):
        return self  # nothing in it changes

    def ends(self, tokens: list[int]) -> bool:
        """Whether the last of `tokens` completes a stop string. Of them the last `self.tokens` are looked at."""
        tokens = tokens[-self.tokens :]
        return self._completes(tokens, True) or (self.of_answer and self._completes(tokens, False))

    def _completes(self, tokens: list[int], special: bool) -> bool:
        text = self.text(tokens, special)
        if not any(string in text for string in self.strings):
            return False
        before = len(self.text(tokens[:-1], special).rstrip("\N{REPLACEMENT CHARACTER}"))  # bytes of no character yet
        return any(text.find(string, max(0, before - len(string) + 1)) >= 0 for string in self.strings)

    def text(self, tokens: list[int], special: bool = True) -> str:
        """Of `tokens`. special: whether special ones have one."""
        return self._decode(tokens, skip_special_tokens=not special)

    def begin(self, text: str) -> int | None:
        """Where the first stop string in `text` begins; None where there is none."""
        return min((at for at in map(text.find, self.strings) if at >= 0), default=None)

    def held(self, text: str) -> int:
        """How many last characters of `text` may be the beginning of a stop string."""
        longest = min(len(text), max(map(len, self.strings)) - 1)
        ends = (length for length in range(longest, 0, -1) if any(s.startswith(text[-length:]) for s in self.strings))
        return next(ends, 0)


class CutText:
    """Text that comes in parts, up to where a stop string begins. Stands in the place of a `DecodeStream` of the
    package tokenizers."""

    def __init__(self, stream, stops: StopStrings):
        self._stream, self._stops, self._held, self.is_cut = stream, stops, "", False

    def step(self, tokenizer, token: int) -> str | None:
        """The text that is known to come before a stop string, with one more token. None for none."""
        text = self._stream.step(tokenizer, token)
        if text is None or self.is_cut:
            return None
        text = self._held + text
        begin = self._stops.begin(text)
        self.is_cut = begin is not None
        keeps = begin if self.is_cut else len(text) - self._stops.held(text)
        self._held = "" if self.is_cut else text[keeps:]
        return text[:keeps] or None

    def rest(self) -> str:
        """What was held back, as it might have been the beginning of a stop string. Nothing comes after it."""
        text, self._held = self._held, ""
        return text


def cut(tokens: list[int], stops: StopStrings, tokenizer, special: bool = True) -> tuple[list[int], str | None]:
    """`tokens` without what the first stop string in their text begins, and their text; None where there is none. The
    text of a token within which it begins is encoded anew. special: whether special tokens are text."""
    low, high = 0, len(tokens)
    text = stops.text(tokens, special)
    begin = stops.begin(text)
    if begin is None:
        return tokens, None
    while low < high:  # the fewest tokens whose text reaches the stop string
        middle = (low + high) // 2
        reaches = len(stops.text(tokens[:middle], special)) > begin
        low, high = (low, middle) if reaches else (middle + 1, high)
    kept = tokens[: low - 1]
    rest = text[len(stops.text(kept, special)) : begin]
    return kept + (tokenizer.encode(rest, add_special_tokens=False) if rest else []), text[:begin]
