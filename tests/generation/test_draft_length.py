"""How many tokens are drafted follows from what was accepted and from measured seconds; here both are simulated."""

import random

import pytest
from draft_policies import Remembered, drafted, forward

from hf_efficient.generation.speculation.draft_length import DraftLengthPolicy
from hf_efficient.generation.speculation.latency_model import CREDIT, FREE_CAPTURES, LatencyCurve


def simulate(acceptance, rows=1, steps=400, depth=10, draft=0.0, confident=False, timed=True):
    """Returns tokens a second by those of plain decoding, and the mean depth of the last quarter. draft: seconds of one
    drafted token. confident: the drafter says how sure it is, and is right about it."""
    chance = random.Random(0)
    policy = DraftLengthPolicy(rows, depth, timed=timed, draft_cost=draft)
    seconds = tokens = 0.0
    depths = []
    for _ in range(steps):
        chosen, accepted = policy.choose([depth] * rows), [0] * rows
        proposal = drafted(rows, chosen, acceptance if confident else None)
        proposal = proposal and policy.trim(proposal)
        width = proposal.width if proposal else 0
        for row in range(rows):
            while accepted[row] < width and chance.random() < acceptance:
                accepted[row] += 1
        spent = forward(rows * (width + 1)) * chance.uniform(0.95, 1.05)
        policy.update(proposal, accepted, [width] * rows, draft * chosen, spent)
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
    assert speed > 0.97, "trials of drafts that do not pay cost less than 3 %"
    # what is lost: learning what forwards cost, the noise of the estimates, and trials
    assert speed > 0.9 * best(acceptance, rows, draft)


def test_without_a_clock_the_length_follows_from_acceptance_alone():
    runs = [simulate(0.7, 2, draft=0.2, timed=False) for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulate(0.2, 1, draft=0.5, timed=False)[1] < 0.3 and simulate(0.95, 1, draft=0.05, timed=False)[1] > 5


def test_sequences_that_leave_take_their_estimate_along():
    policy = DraftLengthPolicy(3, 4, timed=False, draft_cost=0.1)
    for _ in range(30):
        policy.update(drafted(3, 4), [4, 0, 0], [4, 4, 4], 0, 0)
    policy.select([1, 2])
    assert policy.choose([4, 4]) == 0
    policy.select([0])
    assert policy.choose([4]) == 0 and len(policy.accepted) == 1


def test_limits_bound_the_depth():
    policy = DraftLengthPolicy(2, 8, timed=False, draft_cost=0.01)
    assert policy.choose([3, 1]) <= 3 and policy.choose([0, 0]) == 0


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


def test_a_single_measurement_may_hold_a_capture():
    """Before, a drafter whose first deep draft was captured drafted one token from then on."""
    seconds = LatencyCurve()
    seconds.add(3, 40.0)
    assert seconds.at(3) == seconds.at(1) == 40.0
    seconds.add(1, 1.0)
    assert seconds.at(3) == 3.0, "three drafts of one token take no more"
    seconds.add(3, 1.5)
    assert seconds.at(3) == 1.5 and seconds.at(2) == 1.25
    seconds.add(5, 9.0)
    assert seconds.at(5) == 2.5
    seconds.add(5, 9.0)
    assert seconds.at(5) == 9.0


def test_drafts_that_captured_something_are_not_timed():
    captures = [0]
    policy = DraftLengthPolicy(1, 4, **Remembered(), captures_so_far=lambda: captures[0])
    policy.update(None, [0], [0], 0, 1.0)
    policy.choose([50])
    captures[0] += 1
    policy.update(policy.trim(drafted(1, 4, 0.9)), [4], [4], 40.0, 1.1)
    assert policy.statistics.draft_seconds.largest == 0 and policy.statistics.prompt_seconds == 0
    assert policy.statistics.balance == CREDIT and policy.choose([50]) == 4


def test_unsure_drafts_that_are_never_verified_are_paid_for():
    """Also where wider forwards have been measured before."""
    remembered, drafts = Remembered(), 0
    for tokens in (1, 4, 8):
        remembered["latency"].forward_seconds.add(tokens, forward(tokens))
    for _ in range(20):
        policy = DraftLengthPolicy(1, 4, **remembered)
        for step in range(100):
            proposal = drafted(1, policy.choose([100 - step]), 1e-6)
            proposal = proposal and policy.trim(proposal)
            width, drafting = proposal.width if proposal else 0, policy.chosen_depth > 0
            drafts += drafting
            policy.update(proposal, [0], [width], 0.5 * drafting, forward(width + 1))
        policy.finish()
    assert drafts < 60


def test_a_proposal_without_tokens_has_no_depth():
    policy = DraftLengthPolicy(1, 4, **Remembered())
    policy.update(None, [0], [0], 0, 1.0)
    policy.choose([50])
    for depth in (0, 2, 0, 3):
        policy.update(drafted(1, 2, 0.9), [0], [depth], 0.1, 1.1)
    assert policy.statistics.draft_seconds.at(3) == pytest.approx(0.1)


@pytest.mark.parametrize("confidence", [0.01, 0.9])
def test_of_one_sequence_an_unsure_draft_is_no_pause(confidence):
    policy = DraftLengthPolicy(1, 4, **Remembered())
    policy.update(None, [0], [0], 0, 1.0)
    for width in (4, 4, 4):
        policy.choose([50])
        policy.update(drafted(1, width, 0.9), [width], [width], 0.1, 1.1)
    policy.choose([50])
    assert (policy.trim(drafted(1, 4, confidence)) is None) == (confidence < 0.5)
    policy.update(None, [0], [0], 0.1, 1.0)
    assert policy.choose([50]) > 0


def test_padding_of_a_forward_is_used():
    """Of a draft whose tokens add less and less, as many are verified as fit, and forwards are timed by what they
    compute."""
    policy = DraftLengthPolicy(1, 20, padded=lambda rows, columns: -(-columns // 8) * 8)
    widths = []
    for _ in range(30):
        proposal = policy.choose([20]) and drafted(1, 20, 0.6)
        if proposal:
            proposal.confidence *= 0.9
            proposal = policy.trim(proposal)
        widths.append(proposal.width if proposal else 0)
        spent = 1.0 + 0.5 * -(-(widths[-1] + 1) // 8)
        policy.update(proposal or None, [widths[-1] // 3], [widths[-1]], 0.0, spent)
    assert set(widths[10:]) == {7}
    assert policy.forward_seconds.at(3) == policy.forward_seconds.at(8) == 1.5


def test_sequences_that_have_ended_gain_nothing():
    """Beside one that goes on, forwards of seven that ended cost as much: a draft pays by the one alone."""
    policy = DraftLengthPolicy(8, 1)
    for columns, seconds in ((1, 1.0), (2, 1.5)):
        policy.forward_seconds.add(8 * columns, seconds)
    policy.accepted, policy.proposed = [9.0] * 8, [10.0] * 8
    assert policy.choose([1] + [0] * 7) == 1
    policy.accepted[0] = 1.0
    assert policy.choose([1] + [0] * 7) == 0


def call(remembered, captured, tokens, acceptance, cost=12.0, chance=None):
    """A call that generates `tokens` with a confident drafter where each width has to be captured once: its seconds."""
    policy = DraftLengthPolicy(
        1, 10, **remembered, capture_seconds=lambda rows, columns: 0.0 if columns in captured else cost
    )
    chance, done, seconds = chance or random.Random(0), 0, 0.0
    while done < tokens:
        proposal = drafted(1, policy.choose([tokens - done - 1]), acceptance)
        proposal = proposal and policy.trim(proposal)
        width, accepted = proposal.width if proposal else 0, 0
        while accepted < width and chance.random() < acceptance:
            accepted += 1
        is_steady, spent = width + 1 in captured, forward(width + 1)
        if not is_steady:
            captured.add(width + 1)
            spent += cost
        policy.update(proposal, [accepted], [width], 0.0, spent, is_steady)
        done, seconds = done + accepted + 1, seconds + spent
    return seconds


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8])
def test_captures_that_do_not_pay_in_a_call_wait(acceptance):
    """Calls too short to win back what a capture takes make few of them; over many calls these pay."""
    remembered, captured, chance = Remembered(), {1}, random.Random(0)
    plain, calls = 12 * forward(1), []
    for number in range(400):
        calls.append(call(remembered, captured, 12, acceptance, chance=chance))
        if number < 20:
            assert len(captured) <= 1 + FREE_CAPTURES
    assert sum(calls) < 1.04 * 400 * plain
    if acceptance == 0.8:
        assert sum(calls[-50:]) < 0.6 * 50 * plain and len(captured) > 2


def test_captures_that_pay_in_a_call_are_made_at_once():
    remembered, captured = Remembered(), {1}
    for _ in range(FREE_CAPTURES):  # used up
        DraftLengthPolicy(1, 10, **remembered).update(drafted(1, 1), [0], [1], 0.0, 0.0, False)
    assert call(remembered, captured, 400, 0.8) < 0.6 * 400 * forward(1) and len(captured) > 2
