"""Drafting rests where it does not pay, and begins again where it does; acceptance and seconds are simulated."""

import random

import pytest
from draft_policies import Remembered, drafted, forward

from hf_efficient.generation.speculation.draft_length import (
    INVESTED_SHARE,
    MAX_PAUSE,
    MOST_DEBT,
    RETRY_FACTOR,
    SURE_REPEAT,
    DraftLengthPolicy,
)


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


def test_how_a_text_ends_says_little_of_the_next_one():
    """Drafts that are right two times of three save steps, then nothing is right before the call ends: the next call
    drafts at once, and believes in them still."""
    remembered = Remembered()
    policy, generated = DraftLengthPolicy(1, 4, **remembered), 0
    for step in range(130):
        width = policy.choose([200])
        hits = min(width, 2) if step < 60 else 0
        policy.update(drafted(1, width), [hits], [width], 0.2 * width, forward(width + 1))
        generated += 1 + hits
    assert policy.statistics.pause_steps > 8, "drafting rests"
    policy.finish(generated)
    following = DraftLengthPolicy(1, 4, **remembered)
    assert following.statistics.acceptance > 0.5 and not following.skips_call(50) and following.choose([50]) > 0


def test_drafts_that_pay_less_than_reading_the_prompts_rest():
    """Of ten calls of 20 tokens, each with prompts to read that take 30 forwards, the later ones are plain."""
    remembered, made = Remembered(), []
    for _ in range(10):
        policy, generated, drafts = DraftLengthPolicy(1, 4, **remembered), 0, 0
        policy.prompt_seconds = 30.0
        while generated < 20:
            width = 0 if policy.skips_call(20) else policy.choose([20 - generated])
            policy.update(drafted(1, width), [width], [width], 0.05 * width, forward(width + 1))
            generated, drafts = generated + 1 + width, drafts + width
        policy.finish(generated)
        made.append(drafts)
    assert not any(made[5:]), made


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
