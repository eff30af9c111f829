"""How many tokens of each part of a prompt stay.

Instructions keep more than demonstrations (budget controller of LLMLingua, https://arxiv.org/abs/2310.05736), and
documents that a question is about keep more than others (LongLLMLingua, https://arxiv.org/abs/2310.06839).
"""

import math


INSTRUCTION_SHARE = 0.85  # of an instruction's tokens, where the budget allows it
DEMONSTRATION_EXCESS = 2.0  # whole demonstrations are kept up to this many times their budget
RANK_SPREAD = (
    1.0  # of the wishes of the best and the worst document from the mean share: some stay whole, some go whole
)


def part_budgets(
    lengths: list[int], kinds: list[str], forced: list[int], budget: int, worth: list[float] | None
) -> list[int]:
    """Tokens to keep in every part; their sum is `budget`.

    Args:
        lengths: tokens of every part.
        kinds: see `Part.kind`.
        forced: tokens of every part that stay anyhow.
        budget: from the sum of `forced` to the sum of `lengths`.
        worth: of every part; None where nothing is known.
    """
    wish = [0.0] * len(lengths)
    if worth:
        ranked = [index for index, kind in enumerate(kinds) if kind in ("document", "text")]
        if len({worth[index] for index in ranked}) > 1:  # else none is worth more than another
            for rank, index in enumerate(sorted(ranked, key=lambda index: (-worth[index], index))):
                wish[index] = RANK_SPREAD * (1 - 2 * rank / (len(ranked) - 1))
        _drop_demonstrations(wish, lengths, kinds, budget, worth)
    lower = [least / length for least, length in zip(forced, lengths)]
    instructions = [index for index, kind in enumerate(kinds) if kind == "instruction"]
    inside = sum(lengths[index] for index in instructions)
    if inside < sum(lengths) and budget - sum(forced) > INSTRUCTION_SHARE * inside:
        for index in instructions:
            lower[index] = max(lower[index], INSTRUCTION_SHARE)
    return _whole(_level(lengths, wish, lower, budget), lengths, forced, budget)


def _drop_demonstrations(wish, lengths, kinds, budget, worth) -> None:
    """Demonstrations of the least worth, past `DEMONSTRATION_EXCESS` times their budget, wish to keep nothing."""
    shown = [index for index, kind in enumerate(kinds) if kind == "demonstration"]
    room = DEMONSTRATION_EXCESS * budget * sum(lengths[index] for index in shown) / sum(lengths)
    for index in sorted(shown, key=lambda index: (-worth[index], index)):
        room -= lengths[index]
        if room < 0:
            wish[index] = -2.0


def _level(lengths: list[int], wish: list[float], lower: list[float], budget: int) -> list[float]:
    """The shares clip(wish + level, lower, 1) whose tokens are `budget`."""

    def shares(level: float) -> list[float]:
        return [min(max(want + level, least), 1.0) for want, least in zip(wish, lower)]

    low, high = -4.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        kept = sum(share * length for share, length in zip(shares(middle), lengths))
        low, high = (middle, high) if kept < budget else (low, middle)
    return shares(high)


def _whole(shares: list[float], lengths: list[int], forced: list[int], budget: int) -> list[int]:
    """Whole tokens: rounded down, and the largest remainders up."""
    exact = [share * length for share, length in zip(shares, lengths)]
    kept = [max(math.floor(value + 1e-9), least) for value, least in zip(exact, forced)]
    order = sorted(range(len(kept)), key=lambda index: (kept[index] - exact[index], index))
    while (missing := budget - sum(kept)) > 0:
        for index in order:
            if missing and kept[index] < lengths[index]:
                kept[index] += 1
                missing -= 1
    return kept
