import math

import pytest
import torch

from hf_efficient.generation.drafters.base import Proposal
from hf_efficient.generation.speculation.sampling import argmax, draw
from hf_efficient.generation.speculation.verification import verify


def chi_square_excess(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean, by the Wilson-Hilferty transform (a chi-square
    variable's cube root is nearly normal). Cells expected fewer than 5 times are pooled; impossible cells must be empty."""
    counts, expected = counts.double().flatten(), probabilities.double().flatten() * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was generated"
    small = expected < 5
    observed, expected = (torch.cat([x[~small], x[small].sum()[None]]) for x in (counts, expected))
    possible = expected > 0
    statistic = ((observed - expected).square()[possible] / expected[possible]).sum().item()
    degrees = int(possible.sum()) - 1
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


def scores_choosing(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, vocabulary).float()


def test_greedy_keeps_the_matching_prefix_of_each_row():
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3]])
    tokens, accepted, _ = verify(scores_choosing(target, 6), Proposal(drafts, torch.tensor([3, 3, 3, 2])))
    assert accepted.tolist() == [3, 1, 0, 2]  # after a miss a later match does not count; filler is never accepted
    assert [row[: n + 1] for row, n in zip(tokens.tolist(), accepted.tolist())] == [
        [1, 2, 3, 4],
        [1, 2],
        [1],
        [1, 2, 3],
    ]


@pytest.mark.parametrize("vocabulary", (16, 96, 512, 50257))
def test_the_largest_score_is_the_first(vocabulary):
    """The first of equals, a NaN above all, as torch says; few different numbers, so that many are equal."""
    scores = torch.randint(-3, 4, (3, 5, vocabulary)).float()
    scores[0, 0] = float("-inf")
    scores[1, 2, vocabulary // 2 :: 7] = float("nan")
    assert torch.equal(argmax(scores), scores.argmax(-1))
    scores = scores.bfloat16()
    assert torch.equal(argmax(scores), scores.argmax(-1)) and torch.equal(
        argmax(-scores.abs()), (-scores.abs()).argmax(-1)
    )
    ordered = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    ordered = (
        ordered[~ordered.isnan() & (ordered != 0)].repeat(2)[torch.randperm(2 * 65022)][:vocabulary].expand(3, 5, -1)
    )
    assert torch.equal(argmax(ordered), ordered.float().argmax(-1)), "every number there is, one at a time or twice"


@pytest.mark.parametrize("vocabulary", (1, 3, 256, 257, 5000))
def test_a_token_is_drawn_where_its_running_sum_passes_the_number(vocabulary):
    probabilities = torch.rand(40, 2, vocabulary)
    probabilities[torch.rand(probabilities.shape) < 0.5] = 0.0
    probabilities[..., vocabulary // 2] += 0.01
    probabilities /= probabilities.sum(-1, keepdim=True)
    uniforms = torch.rand(40, 2, dtype=torch.float64)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = draw(probabilities, uniforms)
    wanted = (uniforms * sums[..., -1])[..., None]
    # a number within what sums of float32 are off by may belong to a neighbour
    at, before = (sums.gather(-1, (drawn - back)[..., None].clamp(min=0)) for back in (0, 1))
    before = torch.where(drawn[..., None] == 0, 0.0, before)
    assert ((wanted <= at + 1e-6) & (wanted >= before - 1e-6)).all()
    for extreme in (torch.zeros_like(uniforms), torch.full_like(uniforms, 1 - 2.0**-53), uniforms):
        assert (probabilities.gather(-1, draw(probabilities, extreme)[..., None]) > 0).all(), (
            "never one of probability 0"
        )


def test_without_drafts_it_is_plain_decoding():
    tokens, accepted, _ = verify(scores_choosing(torch.tensor([[3], [5]]), 6), None)
    assert tokens.tolist() == [[3], [5]] and accepted.tolist() == [0, 0]
    certain = torch.full((2, 1, 6), float("-inf")).index_fill(2, torch.tensor([4]), 0.0)
    tokens, accepted, _ = verify(certain, None, do_sample=True)
    assert tokens.tolist() == [[4], [4]] and accepted.tolist() == [0, 0]


VOCABULARY, ROWS = 7, 60_000


def chains(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft as Markov chains of order 1: transition probabilities [VOCABULARY, VOCABULARY] each."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 1.5
    draft = target + torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    target[:, 2] = float("-inf")  # tokens only the draft, and only the target, would ever say
    draft[:, 5] = float("-inf")
    return target.softmax(-1), draft.softmax(-1)


def sample_chain(one_hot: bool, counts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the pairs of first two tokens after token 0, generated by speculation, and their exact probabilities."""
    torch.manual_seed(1)
    target, draft = chains(0)
    exact = target[0][:, None] * target
    if one_hot:  # guesses that do not depend on chance
        first = target[0].argmax().expand(ROWS)
        second = target[first].argmax(-1)
    else:
        first = torch.multinomial(draft[0], ROWS, replacement=True)
        second = torch.multinomial(draft[first], 1)[:, 0]
    drafts = torch.stack([first, second], 1)
    scores = torch.stack([target[0].expand(ROWS, -1), target[first], target[second]], 1).log()
    proposed = None if one_hot else torch.stack([draft[0].expand(ROWS, -1), draft[first]], 1)
    tokens, accepted, _ = verify(scores, Proposal(drafts, torch.full((ROWS,), counts), proposed), True)
    # rows with one token go on by the target itself, as the next step would
    second = torch.where(accepted > 0, tokens[:, 1], torch.multinomial(target[tokens[:, 0]], 1)[:, 0])
    pairs = torch.bincount(tokens[:, 0] * VOCABULARY + second, minlength=VOCABULARY**2)
    return pairs, exact


def test_sampling_leaves_the_distribution_of_the_target():
    for one_hot in (False, True):
        for counts in (2, 1):  # with one real draft the second is filler and must not matter
            pairs, exact = sample_chain(one_hot, counts=counts)
            excess = chi_square_excess(pairs, exact)
            assert excess < 4, (
                f"one_hot={one_hot}, counts={counts}: chi-square {excess:.1f} standard deviations too large"
            )


def test_the_chi_square_test_sees_a_wrong_distribution():
    torch.manual_seed(1)
    target, _ = chains(0)
    wrong = target[0] * (1 + 0.1 * torch.tensor([1, -1, 1, -1, 1, -1, 1]))  # every token 10 % too likely or unlikely
    samples = torch.bincount(torch.multinomial(wrong, ROWS, replacement=True), minlength=VOCABULARY)
    assert chi_square_excess(samples, target[0]) > 4
    right = torch.bincount(torch.multinomial(target[0], ROWS, replacement=True), minlength=VOCABULARY)
    assert chi_square_excess(right, target[0]) < 4


def test_equal_distributions_accept_everything():
    torch.manual_seed(0)
    scores = torch.randn(500, 4, 11)
    probabilities = scores[:, :3].softmax(-1)
    drafts = torch.multinomial(probabilities.flatten(0, 1), 1).view(500, 3)
    tokens, accepted, _ = verify(scores, Proposal(drafts, torch.full((500,), 3), probabilities), True)
    assert (accepted == 3).all() and torch.equal(tokens[:, :3], drafts)


def test_a_draft_the_target_excludes_is_never_kept():
    torch.manual_seed(0)
    scores = torch.randn(400, 2, 5)
    scores[:, :, 3] = float("-inf")
    drafts = torch.full((400, 1), 3)
    tokens, accepted, _ = verify(scores, Proposal(drafts, torch.ones(400, dtype=torch.int64)), True)
    assert (accepted == 0).all() and (tokens[:, 0] != 3).all()
