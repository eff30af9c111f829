"""Which drafts of many requests pay, by made-up seconds."""

import time

from hf_efficient.generation.request_drafts import Growing, LookupDrafts
from hf_efficient.generation.speculation.draft_length import MIN_PAUSE
from hf_efficient.generation.speculation.latency_model import LatencyCurve
from hf_efficient.generation.speculation.request_policy import MOST_PAUSE, RequestDraftPolicy


def policy_of(seconds: dict[int, float], most=64) -> RequestDraftPolicy:
    latency = LatencyCurve()
    for tokens, value in seconds.items():
        latency.add(tokens, value)
    return RequestDraftPolicy(lambda tokens: tokens, most, latency)


def test_sure_drafts_are_verified_first():
    """A forward of 4 tokens takes 4 s, and each further one as long as a token takes that is 0.5 likely."""
    policy = policy_of({4: 4.0, 36: 20.0})
    assert policy.share([[0.9, 0.8, 0.4], [0.3], [], [0.7]], 4, 4) == [2, 0, 0, 1]
    assert policy.share([[0.9, 0.8, 0.4], [0.3], [], [0.7]], 4, 63) == [1, 0, 0, 0]  # one fits


def test_nothing_is_drafted_where_tokens_cost_their_seconds():
    policy = policy_of({4: 4.0, 36: 36.0})
    assert policy.share([[0.9] * 3] * 4, 4, 4) == [0] * 4
    assert policy.depth([0.9] * 4, [3] * 4, 4, 4, lambda rows: 0.0) == 0


def test_depth_weighs_the_seconds_of_the_draft():
    policy = policy_of({1: 1.0, 16: 1.1})
    assert policy.depth([0.9], [8], 1, 1, lambda rows: 0.01) == 8
    assert 1 <= policy.depth([0.5], [8], 1, 1, lambda rows: 0.1) <= 3
    assert policy.depth([0.5], [8], 1, 1, lambda rows: 2.0) == 0


def rested(policy: RequestDraftPolicy) -> int:
    """The steps until it drafts again."""
    return next(step for step in range(1000) if not policy.rests())


def test_pauses_double_while_drafts_do_not_pay():
    policy = policy_of({1: 1.0})
    pauses = []
    for _ in range(6):
        policy.count(won=0.0, spent=0.1, drafts=3)
        pauses.append(rested(policy) + 1)
    assert pauses == [8, 16, 32, 64, 128, 128] and (pauses[0], pauses[-1]) == (MIN_PAUSE, MOST_PAUSE)
    policy.count(won=1.0, spent=0.1, drafts=3)
    assert not policy.rests(), "what was won pays for some steps"
    policy.count(won=0.0, spent=5.0, drafts=3)
    assert rested(policy) == MIN_PAUSE - 1


def test_a_look_that_finds_nothing_makes_no_pause_longer():
    policy = policy_of({1: 1.0})
    for _ in range(6):
        policy.count(won=0.0, spent=0.001, drafts=0)
        assert rested(policy) == MIN_PAUSE - 1


def test_no_draft_before_a_forward_was_measured():
    assert policy_of({}).rests()


def test_reading_prompts_is_no_cost_of_drafts(monkeypatch):
    drafts = LookupDrafts(policy_of({1: 1.0, 64: 1.0}), 4)
    monkeypatch.setattr(drafts, "_read", lambda requests, read=drafts._read: (time.sleep(0.2), read(requests)))
    request = Growing("a", [1, 2, 3, 4, 1, 2, 3], 3, 9, list)
    proposed = drafts.propose([request], 1, 1, lambda index, count: count)
    drafts.learn([request], [len(proposed[0])], [0], 1 + len(proposed[0]))
    assert drafts.policy.balance == 0.0, "it lost"
    drafts.policy.balance, drafts.policy._steps_to_trial = 0.1, 0
    proposed = drafts.propose([request], 1, 1, lambda index, count: count)
    drafts.learn([request], [len(proposed[0])], [0], 1 + len(proposed[0]))
    assert drafts.policy.balance > 0, "less than 0.1 s"


def test_lookups_follow_their_requests():
    """Requests come, go and are named anew; each draft continues the text of its own request."""
    drafts = LookupDrafts(policy_of({1: 1.0, 64: 1.0}), 4)

    def propose(*texts):
        requests = [Growing(name, tokens, 3, 9, list) for name, tokens in texts]
        return drafts.propose(requests, len(requests), len(requests), lambda index, count: count)

    repeated = [1, 2, 3, 4, 1, 2, 3]
    assert propose(("a", repeated), ("b", [7, 8, 9]))[0][:2] == [4, 1]
    assert propose(("b", [7, 8, 9, 7, 8]))[0][:1] == [9]
    assert propose(("a", [5, 6, 5]), ("b", [7, 8, 9, 7, 8, 9]))[0][:1] == [6]
