"""LLMLingua and LongLLMLingua: which words of a prompt stay, by the surprise of a causal language model."""

import torch

from hf_efficient.prompts import small_model
from hf_efficient.prompts.groups import Group
from hf_efficient.prompts.selection import Selection
from hf_efficient.prompts.surprisal import Context, surprisal_after
from hf_efficient.prompts.tokens import Word, special_tokens


SEGMENT = 100  # tokens that are judged at once, after what is kept of those before them


class PerplexityRanker:
    """Judges the words of one prompt.

    Args:
        model, tokenizer: a causal language model.
        question: None, or what makes words worth more that it makes likelier.
        ids, words: of the prompt (`tokenize`).
    """

    def __init__(self, model, tokenizer, question: str | None, ids: list[int], words: list[Word]):
        self.model, self.ids, self.words = model, ids, words
        self.head, _ = special_tokens(tokenizer)
        self.positions = small_model.positions(model, tokenizer)
        self.question, self.asked = [], []
        if question is not None:
            self.question = tokenizer.encode(question.strip(), add_special_tokens=False)
            self.asked = self.question + tokenizer.encode("\n\n", add_special_tokens=False)
        room = None if self.positions is None else self.positions - len(self.head) - len(self.asked)
        if room is not None and room < 2:
            raise ValueError(
                f"question has {len(self.question)} tokens, too many for the small model's {self.positions} positions"
            )
        self.segment = SEGMENT if room is None else min(SEGMENT, max(room // 2, 1))

    def worth(self, groups: list[Group]) -> list[float] | None:
        """What each group is worth: minus the question's surprise after it; without a question, demonstrations are
        worth their own surprise. None where there is neither."""
        if self.question:
            judged = [index for index, group in enumerate(groups) if group.kind is not None]
            texts = [self._tokens(groups[index].words) for index in judged]
            found = surprisal_after(self.model, texts, self.question, self.head, self.positions)
            worth = dict(zip(judged, (-value for value in found)))
            return [worth.get(index, 0.0) for index in range(len(groups))]
        if any(group.kind == "demonstration" for group in groups):
            return [self._own_surprise(group) if group.kind == "demonstration" else 0.0 for group in groups]
        return None

    def kept(self, groups: list[Group], worth: list[float] | None, forced: set[int], budget: int) -> set[int]:
        """The words that stay: all of the fixed groups, and `budget` tokens of the others."""
        selection = Selection(self.words, groups, forced, budget, worth)
        contexts = [Context(self.model, self.head, self.positions)]
        if self.question:
            contexts.append(Context(self.model, self.head + self.asked, self.positions))
        last = max((index for index, group in enumerate(groups) if group.kind is not None), default=-1)
        for pieces in self._segments(groups[: last + 1]):
            tokens, scores = self._tokens([word for _, piece in pieces for word in piece]), None
            if not all(selection.is_settled(group) for group, _ in pieces):
                scores = contexts[-1].surprisal(tokens)
                if self.question:
                    scores = contexts[0].surprisal(tokens) - scores
            stays = []
            for group, piece in pieces:
                length = len(self._tokens(piece))
                if scores is None:
                    stays += selection.take_settled(group, piece)
                else:
                    stays += selection.take(group, piece, self._by_word(piece, scores[:length]))
                    scores = scores[length:]
            for context in contexts:
                context.extend(self._tokens(stays))
        for index in range(last + 1, len(groups)):
            selection.take_settled(index, groups[index].words)
        return selection.kept

    def _segments(self, groups: list[Group]) -> list[list[tuple[int, list[int]]]]:
        """Pieces (group, its words) in their order, at most `self.segment` tokens at a time; a longer word is alone."""
        segments, length = [], 0
        for number, group in enumerate(groups):
            for index in group.words:
                if not segments or length + len(self.words[index]) > self.segment:
                    segments.append([])
                    length = 0
                if not segments[-1] or segments[-1][-1][0] != number:
                    segments[-1].append((number, []))
                segments[-1][-1][1].append(index)
                length += len(self.words[index])
        return segments

    def _tokens(self, words: list[int]) -> list[int]:
        return [token for index in words for token in self.ids[self.words[index].first : self.words[index].stop]]

    def _by_word(self, words: list[int], scores: torch.Tensor) -> list[float]:
        """The mean score of each word's tokens."""
        return [part.mean().item() for part in scores.split([len(self.words[index]) for index in words])]

    def _own_surprise(self, group: Group) -> float:
        context, total, count = Context(self.model, self.head, self.positions), 0.0, 0
        for ((_, words),) in self._segments([group]):
            tokens = self._tokens(words)
            total, count = total + context.surprisal(tokens).sum().item(), count + len(tokens)
            context.extend(tokens)
        return total / count
