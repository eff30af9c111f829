"""How many tokens are drafted follows from what was accepted and from measured seconds; here both are simulated."""

import random

import pytest
import torch

from hf_efficient.generation.speculation.draft_length import (
    INVESTED_SHARE,
    MAX_PAUSE,
    MOST_DEBT,
    RETRY_FACTOR,
    SURE_REPEAT,
    DraftLengthPolicy,
)
from hf_efficient.generation.speculation.latency_model import CREDIT, FREE_CAPTURES, LatencyCurve, LatencyModel
from hf_efficient.generation.speculation.proposal import Proposal


class Remembered(dict):
    """What the calls of one model with one drafter share: keyword arguments of the policy."""

    def __init__(self):
        super().__init__(latency=LatencyModel(), statistics={})


def forward(tokens: int) -> float:
    """Bound by memory up to 8 tokens, then by arithmetic."""
    return 1.0 + 0.02 * tokens + 0.1 * max(0, tokens - 8)


def drafted(rows: int, width: int, acceptance: float | None = None) -> Proposal | None:
    """A proposal of `width` tokens a row, None for none. acceptance: by which the drafter states its confidence."""
    if not width:
        return None
    confidence = None if acceptance is None else torch.full((rows, width), acceptance).cumprod(1)
    return Proposal(torch.zeros(rows, width).long(), torch.full((rows,), width), confidence=confidence)


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


@pytest.mark.parametrize(("rows", "share"), [(1, 1.0), (8, 0.0)])
def test_cheap_drafts_that_do_not_pay_are_made_in_trials_alone_in_a_batch(rows, share):
    policy = DraftLengthPolicy(rows, 4)
    made = []
    for _ in range(200):
        proposal = drafted(rows, policy.choose([4] * rows), 1.0)
        made.append(proposal is not None)
        if proposal:
            proposal.confidence.fill_(0.01)
            proposal = policy.trim(proposal)
        width = proposal.width if proposal else 0
        policy.update(proposal, [0] * rows, [width] * rows, 0.0186, forward(rows * (width + 1)))
    assert abs(sum(made[20:]) / 180 - share) < 0.05
    while not policy.choose([4] * rows):
        pass
    policy.calibration = 1.0
    proposal = drafted(rows, 4, 1.0)
    proposal.confidence.fill_(0.99)
    proposal = policy.trim(proposal)
    assert proposal.width == 4
    policy.update(proposal, [4] * rows, [4] * rows, 0.0186, 2 * forward(rows))
    assert all(policy.choose([4] * rows) for _ in range(8)), "and at once again where they pay"


def test_a_drafter_that_did_not_pay_goes_on_pausing_in_the_next_call():
    """A draft that costs half a forward a token and is never right; of three calls of 100 steps the later two are
    plain."""
    remembered, widths = Remembered(), []
    for rows in (8, 8, 8, 2):
        policy = DraftLengthPolicy(rows, 4, **remembered)
        chosen = []
        for _ in range(100):
            chosen.append(policy.choose([4] * rows))
            width = chosen[-1]
            spent = forward(rows * (width + 1))
            policy.update(drafted(rows, width), [0] * rows, [width] * rows, 0.5 * width, spent)
        policy.finish()
        widths.append(sum(width > 0 for width in chosen))
    assert widths[0] > 2 and sum(widths[1:3]) <= 2 and widths[3] > 2, "another number of sequences begins anew"


def test_a_pause_ends_when_drafts_are_right_again():
    remembered, right = Remembered(), 0
    for number in range(16):
        policy = DraftLengthPolicy(2, 4, **remembered)
        for _ in range(100):
            width = policy.choose([4] * 2)
            hits = width if number > 2 else 0
            policy.update(drafted(2, width), [hits] * 2, [width] * 2, 0.01 * width, forward(2 * (width + 1)))
            right += number > 2 and width == 4
        policy.finish()
    assert right > 300, "of 1,300 steps"


def run(remembered, steps, left, right=True, prompt_seconds=0.0, cost=0.05):
    """The depths of `steps` steps, each of which leaves `left` tokens. prompt_seconds: of reading the prompts."""
    policy, depths = DraftLengthPolicy(1, 4, **remembered), []
    for _ in range(steps):
        width = policy.choose([left])
        if width and not any(depths):
            policy.prompt_seconds = prompt_seconds
        depths.append(width)
        policy.update(drafted(1, width), [width * right], [width], cost * width, forward(width + 1))
    policy.finish()
    return depths


def test_reading_the_prompts_has_to_pay_in_what_is_left_of_a_call():
    remembered = Remembered()
    assert run(remembered, 10, left=200, prompt_seconds=40.0)[-1] == 4, "nothing is known of it yet"
    assert run(remembered, 10, left=200, prompt_seconds=40.0)[0] > 0
    assert not any(run(remembered, 8, left=12, prompt_seconds=40.0))


def test_what_the_first_proposal_takes_beyond_others_is_reading_the_prompts():
    remembered = Remembered()
    run(remembered, 10, left=200)
    for _ in range(8):  # more than count
        policy = DraftLengthPolicy(1, 4, **remembered)
        width = policy.choose([2000])
        policy.update(drafted(1, width), [width], [width], 30.0, forward(width + 1))
        statistics = policy.statistics
        assert 29.5 < statistics.prompt_seconds < 30 and statistics.draft_seconds.at(width) < 0.5


def test_a_drafter_whose_pause_outlasts_the_call_skips_it():
    remembered = Remembered()
    for _ in range(4):
        run(remembered, 100, left=100, right=False, cost=0.5)
    policy, longer = (DraftLengthPolicy(1, 4, **remembered) for _ in range(2))
    steps = policy.statistics.steps_to_trial
    assert policy.skips_call(steps - 5) and not longer.skips_call(steps + 5)
    assert longer.watches and not policy.watches, "the drafter has read no prompt"
    assert not any(policy.choose([50]) for _ in range(steps + 5)) and policy.statistics.steps_to_trial == 1


def test_after_a_trial_that_was_right_the_next_comes_sooner():
    remembered, between = Remembered(), []
    for right in (False, True):
        run(remembered, 2 * MAX_PAUSE, left=300, right=False, cost=0.9)  # until pauses are longest
        trials = [step for step, depth in enumerate(run(remembered, 2 * MAX_PAUSE, 300, right, cost=0.9)) if depth]
        between.append(trials[1] - trials[0])
    assert between == [MAX_PAUSE, MAX_PAUSE // RETRY_FACTOR]


def test_reading_prompts_for_trials_takes_a_small_share():
    """After a call of 100 steps the pause is 64 steps at most, and reading the prompts takes 20 forwards."""
    remembered = Remembered()
    run(remembered, 100, left=100, right=False, prompt_seconds=20.0, cost=0.9)
    steps = DraftLengthPolicy(1, 4, **remembered).statistics.steps_to_trial
    assert 20 <= steps * INVESTED_SHARE * forward(1) < 24, "and the first guesses, of which nothing was known"
    assert not any(run(remembered, steps - 5, left=100)) and any(run(remembered, 10, left=100))


@pytest.mark.parametrize("cost", [0.001, 0.2])
def test_in_a_batch_drafts_rest_until_the_drafter_stirs(cost):
    """Drafts that nobody accepts, by a drafter that expects a tenth of them, in twenty calls: trials, ever fewer, of
    cheap drafts, too."""
    remembered, made, verified, rows = Remembered(), [], [], 8
    for _ in range(20):
        policy = DraftLengthPolicy(rows, 4, **remembered)
        for _ in range(100):
            width = policy.choose([100] * rows)
            proposal = drafted(rows, width, 0.1 if width else None)
            proposal = proposal and policy.trim(proposal)
            verify = proposal.width if proposal else 0
            policy.update(proposal, [0] * rows, [verify] * rows, cost, forward(rows * (verify + 1)))
            made.append(width > 0)
            verified.append(verify > 0)
        policy.finish()
    assert sum(verified[:100]) < 8 and sum(verified[100:]) < 8
    assert sum(made[100:]) < 16 and policy.watches and policy.statistics.pause_steps > 500
    policy.statistics.balance = -1.0
    policy.wake(8)
    assert policy.watches, "8 tokens that repeat are not enough where drafts have lost"
    policy.wake(SURE_REPEAT)
    assert not policy.watches and policy.choose([100] * rows) == 4
    assert policy.trim(drafted(rows, 4, 0.1)) is None and policy.watches
    policy.wake(SURE_REPEAT)
    policy.choose([100] * rows)
    policy.update(drafted(rows, 4, 0.95), [4] * rows, [4] * rows, cost, forward(rows * 5))
    assert not policy.watches and policy.statistics.pause_steps == 0, "verified drafts end the pause"


# rows, seconds of a proposal by depth, what the drafter expects of a token (None: it does not say), what is accepted of
# one, and steps between two of which it says that drafts pay (0: never)
CHAT = {
    "PromptLookup": (8, 0.01, 0.6, 0.15, 24),
    "BestOf": (8, 0.1, 0.5, 0.1, 4),
    "TokenRecycling": (8, 0.04, 0.3, 0.1, 0),
    "DraftHeads": (8, 0.15, 0.4, 0.2, 0),
    "assistant": (8, 0.25, None, 0.3, 0),
    "DraftHeads, one prompt": (1, 0.15, 0.5, 0.1, 0),
}


@pytest.mark.parametrize("drafter", CHAT)
def test_twenty_calls_of_chat_are_hardly_slower_than_plain(drafter):
    """Drafts that do not pay, by drafters that expect more of them."""
    rows, cost, expected, right, stirs = CHAT[drafter]
    remembered, chance, seconds, plain = Remembered(), random.Random(0), 0.0, 0.0
    for _ in range(20):
        policy, done, step = DraftLengthPolicy(rows, 4, **remembered), 0.0, 0
        while done < 128:
            step += 1
            if stirs and step % stirs == 0 and policy.watches:
                policy.wake(8)
            proposal = drafted(rows, policy.choose([128 - int(done)] * rows), expected)
            proposal = proposal and policy.trim(proposal)
            width, accepted = proposal.width if proposal else 0, [0] * rows
            for row in range(rows):
                while accepted[row] < width and chance.random() < right:
                    accepted[row] += 1
            drafting = cost * (policy.chosen_depth > 0)
            spent = forward(rows * (width + 1)) * chance.uniform(0.95, 1.05)
            policy.update(proposal, accepted, [width] * rows, drafting, spent)
            done, seconds = done + 1 + sum(accepted) / rows, seconds + spent + drafting
            plain += (1 + sum(accepted) / rows) * forward(rows)
        policy.finish()
    assert plain / seconds > 0.99


def twenty_calls(remembered, right, calls=20):
    """Of calls of 128 tokens in a batch of eight with a free drafter that expects 0.7 of its tokens: seconds of plain
    calls by those of the calls. right: chance of each sequence's tokens."""
    rows, chance, seconds = len(right), random.Random(0), 0.0

    def flat(tokens):
        return 1.0 + 0.02 * tokens

    for _ in range(calls):
        policy, generated = DraftLengthPolicy(rows, 4, **remembered), [1] * rows
        while min(generated) < 128:
            left = [max(0, 127 - count) for count in generated]
            if policy.watches:
                policy.wake(8)
            unfinished = sum(count < 128 for count in generated)
            proposal = drafted(rows, policy.choose(left, unfinished), 0.7)
            proposal = proposal and policy.trim(proposal)
            width, accepted = proposal.width if proposal else 0, [0] * rows
            for row in range(rows):
                while accepted[row] < min(width, left[row]) and chance.random() < right[row]:
                    accepted[row] += 1
            spent = flat(rows * (width + 1))
            policy.update(proposal, accepted, [width] * rows, 0.001, spent)
            generated = [min(128, count + 1 + more) for count, more in zip(generated, accepted)]
            seconds += spent
        policy.finish(max(generated))
    return calls * 127 * flat(rows) / seconds


def test_what_a_batch_gains_is_what_its_last_sequence_gains():
    """Of eight sequences one has no right drafts, so that the calls take as many steps as without. After the first call
    it is known."""
    remembered = Remembered()
    assert twenty_calls(remembered, [0.0] + [0.8] * 7) > 0.99 and remembered["statistics"][8].balance < 0
    assert twenty_calls(remembered, [0.0] + [0.8] * 7) > 0.996
    assert twenty_calls(Remembered(), [0.8] * 8) > 1.5


def test_a_text_that_repeats_itself_ends_a_long_rest():
    remembered = Remembered()
    twenty_calls(remembered, [0.0] * 8)
    policy = DraftLengthPolicy(8, 4, **remembered)
    policy.statistics.balance = -MOST_DEBT
    policy.wake(SURE_REPEAT)
    for right in (False, True):
        for step in range(3):
            proposal = drafted(8, policy.choose([100] * 8), 0.95)
            proposal = proposal and policy.trim(proposal)
            width = proposal.width if proposal else 0
            assert bool(width) is (right or step == 0), "one trial, and more once it was right"
            policy.update(proposal, [width * right] * 8, [width] * 8, 0.001, 1.0 + 0.02 * 8 * (width + 1))
        assert (policy.statistics.balance >= 0) is right
        policy.calibration = 1.0
        policy.wake(SURE_REPEAT)
