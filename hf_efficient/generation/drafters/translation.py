"""Token ids of a target in the token ids of a draft, and back."""

from itertools import groupby

from hf_efficient.integrations.transformers_loop import common_tokens


_MAX_REWRITTEN = 16  # last draft tokens that added text may change: layers with a window cannot be rewound further


class Translation:
    """Between the token ids of a target and those of a draft.

    draft_of: target id -> draft id, of the tokens that both vocabularies have (the same text, as transformers'
        `AssistantToTargetTranslator` compares it) and of the end of a sequence.
    overlap: the number of those that are text, by the size of the smaller vocabulary.
    """

    CONTEXT = 8  # tokens before new ones that are tokenized with them, as the cut depends on what stands before

    def __init__(self, target, draft, target_size: int, draft_size: int):
        self.target, self.draft = target, draft
        pairs = common_tokens(target, draft, target_size)
        self.draft_of = {t: d for t, d in pairs.items() if t < target_size and d < draft_size}
        in_both = self.draft_of.keys() - set(target.all_special_ids)
        self.overlap = len(in_both) / min(len(target), len(draft))
        if target.eos_token_id is not None and draft.eos_token_id is not None:
            self.draft_of = {t: d for t, d in self.draft_of.items() if d != draft.eos_token_id}
            self.draft_of[target.eos_token_id] = draft.eos_token_id
        shared = set(target.all_special_tokens) & set(draft.all_special_tokens)
        self._specials = dict(zip(target.all_special_ids, target.all_special_tokens))
        self._specials = {token: text if text in shared else "" for token, text in self._specials.items()}

    def prompt(self, ids: list[int]) -> list[int]:
        """A prompt in draft ids, at least one. Special tokens that only the target has are left out."""
        pieces = [
            "".join(self._specials[token] for token in tokens) if special else _decode(self.target, list(tokens))
            for special, tokens in groupby(ids, lambda token: token in self._specials)
        ]
        translated = self.draft("".join(pieces))["input_ids"]
        begin = self.draft.bos_token_id
        if translated[:2] == [begin, begin]:  # one in the text, one that the tokenizer adds
            translated = translated[1:]
        return translated or [begin or 0]

    def extend(self, row: list[int], before: list[int], new: list[int], by_tokens: bool) -> list[int]:
        """Appends target ids to a text in draft ids.

        Args:
            row: the draft ids of the text so far. Its end changes where the draft's tokenizer joins old and new text.
            before: the target ids that the text ends with.
            new: the target ids to append.
            by_tokens: tokens in both vocabularies are mapped one by one; else, and for the others, their text is read.
        """
        for known, part in groupby(new, lambda token: by_tokens and token in self.draft_of):
            part = list(part)
            if known:
                row = row + [self.draft_of[token] for token in part]
            else:
                row = _extended(self.target, self.draft, row, before[-self.CONTEXT :], part)
            before = before + part
        return row

    def back(self, before: list[int], new: list[int], ends: bool) -> list[int]:
        """The target ids of the draft ids `new`, which follow `before`; with the end of the sequence if it `ends`."""
        before = before[-self.CONTEXT :]
        own = _encode(self.target, _decode(self.draft, before))
        extended = _extended(self.draft, self.target, own, before, new)
        if extended[: len(own)] != own:  # the target's earlier tokens are final
            extended = own + _encode(self.target, _decode(self.draft, new))
        end = [self.target.eos_token_id] if ends and self.target.eos_token_id is not None else []
        return extended[len(own) :] + end


def _extended(source, destination, row: list[int], before: list[int], new: list[int]) -> list[int]:
    old, text = _decode(source, before), _decode(source, before + new)
    without, with_new = _encode(destination, old), _encode(destination, text)
    same = next((i for i, (a, b) in enumerate(zip(without, with_new)) if a != b), min(len(without), len(with_new)))
    changed = len(without) - same
    if changed <= min(_MAX_REWRITTEN, len(row)) and row[len(row) - changed :] == without[same:]:
        return row[: len(row) - changed] + with_new[same:]
    return row + _encode(destination, _decode(source, new))


def _decode(tokenizer, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character of which some bytes are missing


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
