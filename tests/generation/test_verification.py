"""Which drafts are accepted, and what is drawn, case by case; distributions are in test_speculative_distribution.py."""

import pytest
import torch

from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.sampling import argmax, draw
from hf_efficient.generation.speculation.verification import verify


def scores_choosing(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, vocabulary).float()


def test_greedy_accepts_the_matching_prefix_of_each_sequence():
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3]])
    tokens, accepted, _ = verify(scores_choosing(target, 6), Proposal(drafts, torch.tensor([3, 3, 3, 2])))
    assert accepted.tolist() == [3, 1, 0, 2]  # after a miss a later match does not count; padding is never accepted
    kept = [row[: n + 1] for row, n in zip(tokens.tolist(), accepted.tolist())]
    assert kept == [[1, 2, 3, 4], [1, 2], [1], [1, 2, 3]]


@pytest.mark.parametrize("vocabulary", (16, 96, 512, 50257))
def test_the_largest_score_is_the_first(vocabulary):
    """The first of equals, a NaN above all, as torch says; few different numbers, so that many are equal."""
    scores = torch.randint(-3, 4, (3, 5, vocabulary)).float()
    scores[0, 0] = float("-inf")
    scores[1, 2, vocabulary // 2 :: 7] = float("nan")
    assert torch.equal(argmax(scores), scores.argmax(-1))
    scores = scores.bfloat16()
    for each in (scores, -scores.abs()):
        assert torch.equal(argmax(each), each.argmax(-1))
    ordered = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    ordered = ordered[~ordered.isnan() & (ordered != 0)].repeat(2)[torch.randperm(2 * 65022)]
    ordered = ordered[:vocabulary].expand(3, 5, -1)
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
        likely = probabilities.gather(-1, draw(probabilities, extreme)[..., None])
        assert (likely > 0).all(), "never a token of probability 0"


def test_without_drafts_it_is_plain_decoding():
    tokens, accepted, _ = verify(scores_choosing(torch.tensor([[3], [5]]), 6), None)
    assert tokens.tolist() == [[3], [5]] and accepted is None
    certain = torch.full((2, 1, 6), float("-inf")).index_fill(2, torch.tensor([4]), 0.0)
    tokens, accepted, _ = verify(certain, None, do_sample=True)
    assert tokens.tolist() == [[4], [4]] and accepted is None


def test_equal_distributions_accept_everything():
    torch.manual_seed(0)
    scores = torch.randn(500, 4, 11)
    probabilities = scores[:, :3].softmax(-1)
    drafts = torch.multinomial(probabilities.flatten(0, 1), 1).view(500, 3)
    tokens, accepted, _ = verify(scores, Proposal(drafts, torch.full((500,), 3), probabilities), True)
    assert (accepted == 3).all() and torch.equal(tokens[:, :3], drafts)


def test_a_draft_the_target_excludes_is_never_accepted():
    torch.manual_seed(0)
    scores = torch.randn(400, 2, 5)
    scores[:, :, 3] = float("-inf")
    drafts = torch.full((400, 1), 3)
    tokens, accepted, _ = verify(scores, Proposal(drafts, torch.ones(400, dtype=torch.int64)), True)
    assert (accepted == 0).all() and (tokens[:, 0] != 3).all()
