"""Budgets of parts: their sum, their bounds, and what the papers say of them."""

import pytest

from hf_efficient.prompts.budget import INSTRUCTION_SHARE, part_budgets


@pytest.mark.parametrize("budget", [12, 60, 111, 200])
@pytest.mark.parametrize("worth", [None, [0.0, 3.0, 1.0, 2.0, 0.5]])
def test_every_token_of_the_budget_is_spent_within_the_bounds(budget, worth):
    lengths, forced = [20, 50, 60, 40, 30], [2, 0, 10, 0, 0]
    kept = part_budgets(lengths, ["instruction", *["document"] * 4], forced, budget, worth)
    assert sum(kept) == budget
    assert all(least <= count <= length for least, count, length in zip(forced, kept, lengths))


def test_instructions_keep_most():
    kept = part_budgets([100, 400], ["instruction", "document"], [0, 0], 250, None)
    assert kept == [round(100 * INSTRUCTION_SHARE), 250 - round(100 * INSTRUCTION_SHARE)]


def test_a_budget_too_small_for_instructions_is_shared_evenly():
    assert part_budgets([100, 100], ["instruction", "document"], [0, 0], 80, None) == [40, 40]


def test_documents_keep_more_the_more_they_are_worth():
    kept = part_budgets([100] * 5, ["document"] * 5, [0] * 5, 250, [1.0, 3.0, 2.0, 5.0, 4.0])
    assert kept == [0, 50, 0, 100, 100]


@pytest.mark.parametrize("worth", [[2.0, 1.0, 0.0, 0.0, 0.0], [5.0, 5.0, 3.0, 3.0, 3.0]])
def test_documents_of_equal_worth_keep_equally_much(worth):
    kinds = ["demonstration"] * 2 + ["document"] * 3
    assert part_budgets([50] * 5, kinds, [0] * 5, 125, worth) == [25] * 5


def test_demonstrations_past_twice_their_budget_go_whole():
    kept = part_budgets([100] * 4, ["demonstration"] * 4, [0] * 4, 100, [1.0, 4.0, 3.0, 2.0])
    assert kept == [0, 50, 50, 0]
