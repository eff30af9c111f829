"""The words that stay, taken passage by passage within the budget of each."""

from hf_efficient.prompts.budget import part_budgets
from hf_efficient.prompts.groups import Group
from hf_efficient.prompts.tokens import Word


class Selection:
    """What is taken so far.

    Args:
        words: of the prompt.
        groups: see `part_budgets`, as for `worth`.
        forced: words that stay anyhow.
        budget: tokens of the groups that may lose words.
    """

    def __init__(
        self, words: list[Word], groups: list[Group], forced: set[int], budget: int, worth: list[float] | None
    ):
        self.words, self.forced, self.kept = words, forced, set()
        judged = [index for index, group in enumerate(groups) if group.kind is not None]
        lengths = {index: self._length(groups[index].words) for index in judged}
        must = {index: self._length(forced.intersection(groups[index].words)) for index in judged}
        found = part_budgets(
            list(lengths.values()),
            [groups[index].kind for index in judged],
            list(must.values()),
            budget,
            worth and [worth[index] for index in judged],
        )
        # group -> (its tokens that are not forced, how many of them to keep)
        self.free = {index: (lengths[index] - must[index], kept - must[index]) for index, kept in zip(judged, found)}
        self.taken, self.due = 0, 0.0  # tokens that are not forced: taken of all groups so far, and their budget

    def _length(self, words) -> int:
        return sum(len(self.words[index]) for index in words)

    def is_settled(self, group: int) -> bool:
        """Whether all its words that are not forced stay, or none: no scores are needed."""
        length, budget = self.free.get(group, (0, 0))
        return budget in (0, length)

    def take_settled(self, group: int, words: list[int]) -> list[int]:
        """As `take`, for the words of a settled group, or of one that may lose none."""
        return self.take(group, words, [0.0] * len(words))

    def take(self, group: int, words: list[int], scores: list[float]) -> list[int]:
        """Of the next words of a group those that stay: the forced ones, and the others of the largest scores until
        the share of the budget up to here is taken. What a word was too long for is left to the next segment."""
        if group not in self.free:
            self.kept.update(words)
            return words
        free = [(score, index) for score, index in zip(scores, words) if index not in self.forced]
        length, budget = self.free[group]
        more = self._length(index for _, index in free)
        self.due += budget * more / length if more else 0.0
        room = round(self.due) - self.taken
        chosen = self.forced.intersection(words)
        for _, index in sorted(free, key=lambda pair: (-pair[0], pair[1])):
            if len(self.words[index]) <= room or budget == length:
                chosen.add(index)
                room -= len(self.words[index])
                self.taken += len(self.words[index])
        self.kept |= chosen
        return [index for index in words if index in chosen]
