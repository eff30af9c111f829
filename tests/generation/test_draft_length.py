"""How many tokens are drafted follows from what was accepted and from measured seconds; here both are simulated."""

import random

import pytest
import torch

from hf_efficient.generation.drafters.base import Proposal
from hf_efficient.generation.speculation.draft_length import INVESTED, LONGEST_PAUSE, SOONER, DraftLength
from hf_efficient.generation.speculation.latency_model import FREE_RECORDINGS, LatencyCurve


def forward(tokens: int) -> float:
    """Bound by memory up to 8 tokens, then by arithmetic."""
    return 1.0 + 0.02 * tokens + 0.1 * max(0, tokens - 8)


def simulate(acceptance, rows=1, steps=400, depth=10, draft=0.0, confident=False, timed=True):
    """Returns tokens a second by those of plain decoding, and the mean depth of the last quarter. draft: seconds of one
    drafted token. confident: the drafter says how sure it is, and is right about it."""
    model, chance = torch.nn.Linear(1, 1), random.Random(0)
    length = DraftLength(model, rows, depth, timed, draft_cost=draft)
    seconds = tokens = 0.0
    depths = []
    for _ in range(steps):
        chosen, proposal, accepted = length.choose([depth] * rows), None, [0] * rows
        if chosen:
            sure = torch.tensor([[acceptance ** (i + 1) for i in range(chosen)]] * rows) if confident else None
            proposal = Proposal(torch.zeros(rows, chosen).long(), torch.full((rows,), chosen), confidence=sure)
            proposal = length.cut(proposal)
        width = 0 if proposal is None else proposal.width
        for row in range(rows):
            while accepted[row] < width and chance.random() < acceptance:
                accepted[row] += 1
        spent = forward(rows * (width + 1)) * chance.uniform(0.95, 1.05)
        length.learn(proposal, accepted, [width] * rows, draft * chosen, spent)
        seconds += spent + draft * chosen
        tokens += sum(accepted) + rows
        depths.append(width)
    late = depths[-steps // 4 :]
    return tokens / seconds / (rows / forward(rows)), sum(late) / len(late)


def best(acceptance, rows, draft, depth=10):
    """What always drafting the best number of tokens gives."""
    rates = []
    for g in range(depth + 1):
        expected = sum(acceptance**i for i in range(g + 1))
        rates.append(expected / (forward(rows * (g + 1)) + draft * g) / (1 / forward(rows)))
    return max(rates)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(("draft", "confident"), [(0.0, True), (0.1, False), (0.5, False)])
def test_close_to_the_best_length_and_never_slower_than_plain(rows, acceptance, draft, confident):
    speed, _ = simulate(acceptance, rows, draft=draft, confident=confident)
    optimum = best(acceptance, rows, draft)
    assert speed > 0.97, "trials of drafts that do not pay cost less than 3 %"
    # what is lost: learning what forwards cost, the noise of the estimates, and trials
    assert speed > 0.9 * optimum


def test_without_a_clock_the_length_follows_from_acceptance_alone():
    runs = [simulate(0.7, 2, draft=0.2, timed=False) for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulate(0.2, 1, draft=0.5, timed=False)[1] < 0.3 and simulate(0.95, 1, draft=0.05, timed=False)[1] > 5


def test_rows_that_leave_take_their_estimate_along():
    length = DraftLength(torch.nn.Linear(1, 1), 3, 4, timed=False, draft_cost=0.1)
    for _ in range(30):
        length.learn(Proposal(torch.zeros(3, 4).long(), torch.full((3,), 4)), [4, 0, 0], [4, 4, 4], 0, 0)
    length.select([1, 2])
    assert length.choose([4, 4]) == 0
    length.select([0])
    assert length.choose([4]) == 0 and len(length.kept) == 1


def test_limits_bound_the_depth():
    length = DraftLength(torch.nn.Linear(1, 1), 2, 8, timed=False, draft_cost=0.01)
    assert length.choose([3, 1]) <= 3 and length.choose([0, 0]) == 0


def test_seconds_between_and_beyond_what_was_measured():
    seconds = LatencyCurve()
    assert seconds.largest == 0 and seconds.at(5) == 0.0
    for size, value in ((2, 1.3), (2, 9.0), (2, 1.2), (10, 3.2)):
        seconds.add(size, value)
    assert seconds.at(2) == 1.2 and seconds.at(6) == pytest.approx(2.2)
    assert seconds.at(1) == 1.2 and seconds.at(50) == 3.2
    for value in (2.0, 1.5, 1.6):
        seconds.add(2, value)
    assert seconds.at(2) == 1.3
    seconds.add(5, 9.0)
    assert seconds.at(5) == 3.2, "a smaller size takes no longer than a larger one"


def test_columns_that_a_forward_computes_anyway_are_used():
    """Of a draft whose tokens add less and less, as many are verified as fit, and forwards are timed by what they compute."""
    length = DraftLength(torch.nn.Linear(1, 1), 1, 20, padded=lambda rows, columns: -(-columns // 8) * 8)
    confidence = 0.9 * torch.full((1, 20), 0.6).cumprod(1)

    def widths(steps):
        for _ in range(steps):
            drafted = length.choose([20]) and length.cut(
                Proposal(torch.zeros(1, 20).long(), torch.full((1,), 20), confidence=confidence)
            )
            width = drafted.width if drafted else 0
            length.learn(drafted or None, [width // 3], [width], 0.0, 1.0 + 0.5 * -(-(width + 1) // 8))
            yield width

    assert set(list(widths(30))[10:]) == {7}
    assert length.forward.at(3) == length.forward.at(8) == 1.5


def test_rows_that_have_ended_gain_nothing():
    """Beside one row that goes on, forwards of seven that ended cost as much: a draft pays by the one alone."""
    length = DraftLength(torch.nn.Linear(1, 1), 8, 1)
    for columns, seconds in ((1, 1.0), (2, 1.5)):
        length.forward.add(8 * columns, seconds)
    length.kept, length.tried = [9.0] * 8, [10.0] * 8
    assert length.choose([1] + [0] * 7) == 1
    length.kept[0] = 1.0
    assert length.choose([1] + [0] * 7) == 0


def call(model, recorded, tokens, acceptance, cost=12.0, chance=None):
    """A call that generates `tokens` with a confident drafter where each width has to be recorded once: its seconds."""
    length = DraftLength(
        model, 1, 10, recording=lambda rows, columns: 0.0 if columns in recorded else cost, padded=lambda rows, c: c
    )
    chance, done, seconds = chance or random.Random(0), 0, 0.0
    while done < tokens:
        chosen, proposal = length.choose([tokens - done - 1]), None
        if chosen:
            sure = torch.tensor([[acceptance ** (i + 1) for i in range(chosen)]])
            proposal = length.cut(Proposal(torch.zeros(1, chosen).long(), torch.tensor([chosen]), confidence=sure))
        width, accepted = 0 if proposal is None else proposal.width, 0
        while accepted < width and chance.random() < acceptance:
            accepted += 1
        settled, spent = width + 1 in recorded, forward(width + 1)
        if not settled:
            recorded.add(width + 1)
            spent += cost
        length.learn(proposal, [accepted], [width], 0.0, spent, settled)
        done, seconds = done + accepted + 1, seconds + spent
    return seconds


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8])
def test_recordings_that_do_not_pay_in_a_call_wait(acceptance):
    """Calls too short to win back what recording takes make few of them; over many calls these pay."""
    model, recorded, chance = torch.nn.Linear(1, 1), {1}, random.Random(0)
    plain, calls = 12 * forward(1), []
    for number in range(400):
        calls.append(call(model, recorded, 12, acceptance, chance=chance))
        if number < 20:
            assert len(recorded) <= 1 + FREE_RECORDINGS
    assert sum(calls) < 1.04 * 400 * plain
    if acceptance == 0.8:
        assert sum(calls[-50:]) < 0.6 * 50 * plain and len(recorded) > 2


def test_recordings_that_pay_in_a_call_are_made_at_once():
    model, recorded = torch.nn.Linear(1, 1), {1}
    for _ in range(FREE_RECORDINGS):  # used up
        DraftLength(model, 1, 10).learn(Proposal(torch.zeros(1, 1).long(), torch.ones(1)), [0], [1], 0.0, 0.0, False)
    assert call(model, recorded, 400, 0.8) < 0.6 * 400 * forward(1) and len(recorded) > 2


@pytest.mark.parametrize(("rows", "share"), [(1, 1.0), (8, 0.25)])
def test_cheap_drafts_that_do_not_pay_are_made_now_and_then_in_a_batch(rows, share):
    length = DraftLength(torch.nn.Linear(1, 1), rows, 4)
    made = []
    for _ in range(200):
        chosen, proposal = length.choose([4] * rows), None
        if chosen:
            unsure = torch.full((rows, chosen), 0.01)
            proposal = Proposal(torch.zeros(rows, chosen).long(), torch.full((rows,), chosen), confidence=unsure)
            proposal = length.cut(proposal)
        width = 0 if proposal is None else proposal.width
        made.append(chosen > 0)
        length.learn(proposal, [0] * rows, [width] * rows, 0.0186, forward(rows * (width + 1)))
    assert abs(sum(made[20:]) / 180 - share) < 0.05
    sure = torch.full((rows, 4), 0.99)
    proposal = Proposal(torch.zeros(rows, 4).long(), torch.full((rows,), 4), confidence=sure)
    while not length.choose([4] * rows):
        pass
    length.calibration = 1.0
    proposal = length.cut(proposal)
    assert proposal.width == 4
    length.learn(proposal, [4] * rows, [4] * rows, 0.0186, forward(rows * 5))
    assert all(length.choose([4] * rows) for _ in range(8)), "and at once again where they pay"


class Draft:
    """Something that can be referred to weakly."""


def test_what_did_not_pay_goes_on_resting_in_the_next_run():
    """A draft that costs half a forward a token and is never right; of three runs of 100 steps the later two are plain."""
    model, draft, widths = torch.nn.Linear(1, 1), Draft(), []
    for rows in (8, 8, 8, 2):
        length = DraftLength(model, rows, 4, draft=draft)
        chosen = []
        for _ in range(100):
            chosen.append(length.choose([4] * rows))
            width = chosen[-1]
            proposal = Proposal(torch.zeros(rows, width).long(), torch.full((rows,), width)) if width else None
            length.learn(proposal, [0] * rows, [width] * rows, 0.5 * width, forward(rows * (width + 1)))
        length.end()
        widths.append(sum(width > 0 for width in chosen))
    assert widths[0] > 2 and sum(widths[1:3]) <= 2 and widths[3] > 2, "another number of rows begins anew"


def test_a_rest_ends_when_drafts_are_right_again():
    model, draft = torch.nn.Linear(1, 1), Draft()
    right = 0
    for run in range(16):
        length = DraftLength(model, 2, 4, draft=draft)
        for _ in range(100):
            width = length.choose([4] * 2)
            proposal = Proposal(torch.zeros(2, width).long(), torch.full((2,), width)) if width else None
            hits = width if run > 2 else 0
            length.learn(proposal, [hits] * 2, [width] * 2, 0.01 * width, forward(2 * (width + 1)))
            right += run > 2 and width == 4
        length.end()
    assert right > 300, "of 1,300 steps"


def run(model, draft, steps, left, right=True, starting=0.0, cost=0.05):
    """The depths of `steps` steps, each of which leaves `left` tokens. starting: seconds of reading the prompts."""
    length, depths = DraftLength(model, 1, 4, draft=draft), []
    for _ in range(steps):
        width = length.choose([left])
        if width and not any(depths):
            length.starting = starting
        depths.append(width)
        proposal = Proposal(torch.zeros(1, width).long(), torch.full((1,), width)) if width else None
        length.learn(proposal, [width * right], [width], cost * width, forward(width + 1))
    length.end()
    return depths


def test_reading_the_prompts_has_to_pay_in_what_is_left_of_a_run():
    model, draft = torch.nn.Linear(1, 1), Draft()
    assert run(model, draft, 10, left=200, starting=40.0)[-1] == 4, "nothing is known of it yet"
    assert run(model, draft, 10, left=200, starting=40.0)[0] > 0
    assert not any(run(model, draft, 8, left=12, starting=40.0))


def test_what_the_first_proposal_takes_beyond_others_is_reading_the_prompts():
    model, draft = torch.nn.Linear(1, 1), Draft()
    run(model, draft, 10, left=200)
    for _ in range(8):  # more than are remembered
        length = DraftLength(model, 1, 4, draft=draft)
        width = length.choose([2000])
        proposal = Proposal(torch.zeros(1, width).long(), torch.full((1,), width))
        length.learn(proposal, [width], [width], 30.0, forward(width + 1))
        assert 29.5 < length.drafter.starting < 30 and length.drafter.drafting.at(width) < 0.5


def test_a_drafter_that_rests_for_the_whole_run_sits_it_out():
    model, draft = torch.nn.Linear(1, 1), Draft()
    for _ in range(4):
        run(model, draft, 100, left=100, right=False, cost=0.5)
    length = DraftLength(model, 1, 4, draft=draft)
    waiting = length.drafter.waiting
    assert length.sits_out(waiting - 5) and not DraftLength(model, 1, 4, draft=draft).sits_out(waiting + 5)
    assert not any(length.choose([50]) for _ in range(waiting + 5)) and length.drafter.waiting == 1


def test_after_a_trial_that_was_right_the_next_comes_sooner():
    model, draft, between = torch.nn.Linear(1, 1), Draft(), []
    for right in (False, True):
        run(model, draft, 2000, left=300, right=False, cost=0.9)  # until pauses are longest
        trials = [step for step, depth in enumerate(run(model, draft, 2200, 300, right, cost=0.9)) if depth]
        between.append(trials[1] - trials[0])
    assert between == [LONGEST_PAUSE, LONGEST_PAUSE // SOONER]


def test_reading_prompts_for_trials_takes_a_small_share():
    """After a run of 100 steps the pause is 64 steps at most, and reading the prompts takes 20 forwards."""
    model, draft = torch.nn.Linear(1, 1), Draft()
    run(model, draft, 100, left=100, right=False, starting=20.0, cost=0.9)
    steps = DraftLength(model, 1, 4, draft=draft).drafter.waiting
    assert 20 <= steps * INVESTED * forward(1) < 24, "and the first guesses, of which nothing was known"
    assert not any(run(model, draft, steps - 5, left=100)) and any(run(model, draft, 10, left=100))
