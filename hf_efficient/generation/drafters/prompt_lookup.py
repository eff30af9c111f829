"""Drafts copied from the row itself: what followed the last time its most recent tokens occurred."""

import torch

from hf_efficient.generation.drafters.base import Drafter, Proposal
from hf_efficient.generation.sequences import Sequences


class PromptLookupDrafter(Drafter):
    """Looks the last n tokens of a row up in the row (prompt and output) and proposes what followed them, for n from
    `max_ngram` down to 1; the most recent occurrence wins. The copy may run into its own output, so a repeated phrase is
    drafted to full length. No model, no padding tokens, O(max_ngram) a step and row (Saxena 2023, "Prompt Lookup
    Decoding"; He et al. 2023, "REST").

    Args:
        num_tokens: how many tokens to propose at most, >= 1.
        max_ngram: length of the longest suffix looked up, >= 1.
    """

    def __init__(self, num_tokens: int, max_ngram: int = 2):
        for name, value in (("prompt_lookup_num_tokens", num_tokens), ("max_matching_ngram_size", max_ngram)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected an integer of at least 1")
        self.num_tokens = self.max_tokens = num_tokens
        self.max_ngram = max_ngram

    def begin(self, sequences: Sequences, hidden=None) -> None:
        self.device = sequences.device
        self.rows: list[list[int]] = [[] for _ in sequences.live]
        self.followed_by: list[dict] = [{} for _ in sequences.live]  # n-gram -> where what followed it last begins
        self.accept(sequences.token_lists())

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        for row, followed_by, new in zip(self.rows, self.followed_by, tokens):
            for token in new:
                end = len(row)  # the n-grams ending just before are now known to be followed by `token`
                for n in range(1, min(self.max_ngram, end) + 1):
                    followed_by[tuple(row[end - n :])] = end
                row.append(token)

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        guesses = [
            self._guess(row, followed_by, min(limit, self.num_tokens, nodes)) if limit > 0 else []
            for row, followed_by, limit in zip(self.rows, self.followed_by, limits)
        ]
        counts = [len(guess) for guess in guesses]
        width = max(counts, default=0)
        if width == 0:
            return None
        filled = [guess + row[-1:] * (width - len(guess)) for guess, row in zip(guesses, self.rows)]
        return Proposal(torch.tensor(filled, device=self.device), torch.tensor(counts, device=self.device))

    def _guess(self, row: list[int], followed_by: dict, length: int) -> list[int]:
        for n in range(min(self.max_ngram, len(row)), 0, -1):
            begin = followed_by.get(tuple(row[-n:]))
            if begin is not None:
                period = row[begin:]
                return [period[i % len(period)] for i in range(length)]
        return []

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.followed_by = [self.followed_by[row] for row in rows]
