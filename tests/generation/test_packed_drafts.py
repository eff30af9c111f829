"""Drafts of unequal length are verified without padding, one draft length a sequence, and the output stays the same."""

import pytest
import torch
from draft_models import fixed
from helpers import left_padded_batch, tiny_model
from oracle import Oracle
from transformers.generation import StoppingCriteria

from hf_efficient import BestOf, EagleHead, PromptLookup, TokenRecycling, enable_speculation, warm_up
from hf_efficient.generation import model_state
from hf_efficient.generation.loop import SpeculativeLoop
from hf_efficient.generation.replay import captured_forward
from hf_efficient.generation.replay.captured_forward import PACKED_WIDTHS, CapturedForward, packed_width, padded
from hf_efficient.generation.speculation.latency_model import LatencyModel
from hf_efficient.generation.speculation.packed_length import PackedLengthPolicy
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.kernels.replay.recorder import interpreter


NEW = 24


class Uneven(Oracle):
    """Drafts fewer tokens for some sequences, of some none."""

    computes = False

    def propose(self, limits, nodes):
        proposal = super().propose(limits, nodes)
        if proposal is not None:
            proposal.counts = torch.minimum(proposal.counts, torch.arange(len(limits)) * self.siblings % 9)
        return proposal


class OneDrafts(Oracle):
    """Drafts eight tokens for the first sequence, none for the others."""

    computes = False

    def propose(self, limits, nodes):
        proposal = super().propose(limits, nodes)
        if proposal is not None:
            proposal.counts = proposal.counts * (torch.arange(len(limits)) == 0)
        return proposal


@pytest.fixture
def computed(monkeypatch):
    """The tokens that each forward of the loop computed."""
    numbers, forward = [], SpeculativeLoop._forward

    def noted(self, proposal):
        logits = forward(self, proposal)
        numbers.append(self.target.computed)
        return logits

    monkeypatch.setattr(SpeculativeLoop, "_forward", noted)
    return numbers


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_what_is_verified_is_what_was_drafted(name, monkeypatch):
    target, inputs = enable_speculation(tiny_model(name)), left_padded_batch([1, 9, 4, 7, 12, 3, 5, 8])
    options = dict(max_new_tokens=NEW, do_sample=False)
    target.generation_config.eos_token_id = int(target.generate(**inputs, **options)[4, -NEW // 2])
    plain, forwards, forward = target.generate(**inputs, **options), [], SpeculativeLoop._forward

    def noted(self, proposal):
        logits = forward(self, proposal)
        counts = [0] * len(self.sequences.live) if proposal is None else proposal.counts.tolist()
        going = [count for count, b in zip(counts, self.sequences.live) if self.sequences.unfinished(b)]
        forwards.append((self.target.computed, sum(going) + len(going), logits is None))
        return logits

    monkeypatch.setattr(SpeculativeLoop, "_forward", noted)
    for siblings in (1, 3):
        draft = fixed(Uneven(plain, 0.8, 4, 128, siblings))
        for _ in range(2):
            forwards.clear()
            assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), plain)
    for computed, needed, has_no_logits in forwards:
        assert computed == packed_width(needed) and has_no_logits
    assert forwards[-1][0] < 8, "sequences that have ended take no token"
    for draft in (fixed(TokenRecycling()), fixed(EagleHead.for_model(target, 64))):  # read logits, and hidden states
        assert all(torch.equal(target.generate(**inputs, **options, assistant_model=draft), plain) for _ in range(2))


def policy(rows: int, per_token: float) -> PackedLengthPolicy:
    latency = LatencyModel()
    for width in PACKED_WIDTHS:
        latency.forward_seconds.add(width, 1.0 + per_token * width)
    made = PackedLengthPolicy(
        rows, 8, latency, {}, packed=packed_width, packed_capture_seconds=lambda rows, tokens: 0.0
    )
    made.statistics.has_confidence = True
    return made


def drafted(*chances: float) -> Proposal:
    confidence = torch.tensor(chances)[:, None].expand(-1, 8).cumprod(1)
    return Proposal(torch.zeros(confidence.shape).long(), torch.full((len(chances),), 8), confidence=confidence)


def test_a_draft_length_for_each_sequence():
    made = policy(3, 0.05)
    made.depths([50, 50, 50])
    sure, unsure, hopeless = made.trim(drafted(0.95, 0.6, 0.05)).counts.tolist()
    assert sure > unsure > hopeless
    behind = policy(3, 0.05)
    behind.depths([50, 50, 5])
    waited_for, also, ahead = behind.trim(drafted(0.7, 0.7, 0.7)).counts.tolist()
    assert waited_for == also > ahead, "the batch waits for those with the longest way"
    ended = policy(3, 0.05)
    ended.depths([50, 0, 50])
    proposal = drafted(0.9, 0.9, 0.9)
    proposal.counts[1] = 0
    assert ended.trim(proposal).counts[1] == 0


def test_broken_promises_and_costs_end_drafts():
    made = policy(2, 0.05)
    for _ in range(30):
        made.depths([50, 50])
        proposal = made.trim(drafted(0.9, 0.9))
        if proposal is not None:
            counts = proposal.counts.tolist()
            made.update(proposal, [counts[0], 0], counts, 0.001, 1.0, True, packed_width(2 + sum(counts)))
    kept, broken = made.right / made.promised  # counted for each sequence alone
    assert counts[0] == 8 and kept > 1 and broken < 0.1
    made.select([1])
    assert len(made.right) == len(made.pace) == 1
    dear = policy(2, 2.0)
    dear.depths([50, 50])
    assert dear.trim(drafted(0.5, 0.5)) is None


def test_a_call_within_a_pause_reads_no_hidden_states(monkeypatch):
    """A drafter that does not pay costs nothing: its calls are plain ones, and count towards its next trial."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([3, 5])
    heads, options = EagleHead.for_model(target, 64), dict(max_new_tokens=6, do_sample=False)
    plain = target.generate(**inputs, **options)
    target.generate(**inputs, **options, assistant_model=heads)
    known = model_state.state_of(target).drafter(heads).statistics[2]
    known.steps_to_trial = 20
    monkeypatch.setattr(EagleHead, "begin", None)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=heads), plain)
    assert known.steps_to_trial == 15


@pytest.mark.skipif(interpreter() is None, reason="nothing is captured without the C++ kernels")
def test_eager_forwards_say_nothing_of_captured_ones():
    """Over the cache that a padded batch with "sdpa" returns nothing is captured: its forwards take several times as
    long, which later calls must not believe of theirs."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([3, 5])
    target.set_attn_implementation("sdpa")
    options = dict(max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    state = model_state.state_of(target)
    target.generate(**inputs, **options, return_dict_in_generate=True)
    assert state.eager_latency.forward_seconds.largest and not state.latency.forward_seconds.largest
    target.generate(**inputs, **options)
    assert state.latency.forward_seconds.largest


def test_a_sampled_call_within_a_pause_does_not_watch(monkeypatch):
    """A lookup beside heads would have to read hidden states that nobody collects."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([3, 5])
    drafter = BestOf(PromptLookup(), EagleHead.for_model(target, 64))
    options = dict(max_new_tokens=6, do_sample=True, assistant_model=drafter)
    target.generate(**inputs, **options)
    model_state.state_of(target).drafter(drafter).statistics[2].steps_to_trial = 64
    monkeypatch.setattr(EagleHead, "begin", None)
    assert target.generate(**inputs, **options).shape[1] > 5


@pytest.mark.parametrize("stirs", [True, False])
def test_drafts_that_rest_go_on_where_the_text_repeats_itself(stirs, monkeypatch):
    """Four sequences, each a circle of eight tokens, within a pause that outlasts the call."""
    target, inputs = tiny_model("llama", eos_token_id=None, tie_word_embeddings=False), left_padded_batch([3, 5, 4, 2])
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        target.lm_head.weight.copy_(target.get_input_embeddings().weight.roll(16, 0))
    enable_speculation(target)
    options, drafter, asked = dict(max_new_tokens=40, do_sample=False), PromptLookup(), []
    plain = target.generate(**inputs, **options)
    assert torch.equal(plain[:, 5:13], plain[:, 13:21])
    target.generate(**inputs, **options, assistant_model=drafter)
    known = model_state.state_of(target).drafter(drafter.remembered_by).statistics[4]
    known.steps_to_trial = known.pause_steps = 1000
    propose = PromptLookup.propose
    monkeypatch.setattr(PromptLookup, "propose", lambda self, *args: asked.append(args) or propose(self, *args))
    if not stirs:
        monkeypatch.setattr(PromptLookup, "stirs", lambda self: False)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert bool(asked) is stirs


def test_large_padded_forwards_warm_up_packed_ones(computed):
    """24 sequences of 9 columns are too many tokens for a capture, those that were drafted are not."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([5] * 24)
    target.generation_config.eos_token_id = None
    options = dict(max_new_tokens=NEW, do_sample=False)
    plain = target.generate(**inputs, **options)
    model_state.forget(target)
    draft = fixed(OneDrafts(plain, 1.0, 8, 128))
    computed.clear()
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), plain)
    assert computed[:3] == [24 * 9, 24 * 9, 32]


def test_a_changed_model_packs_no_longer(computed):
    """Forwards run eagerly then: sequences that have ended leave the batch, and none is priced as packed."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([4] * 4)
    target.generation_config.eos_token_id = 1000

    class Changes(StoppingCriteria):
        def __call__(self, ids, scores, **options):
            target.touched = ids.shape[1]
            return torch.arange(len(ids)) < (3 if ids.shape[1] > 7 else 0)

    options = dict(max_new_tokens=NEW, do_sample=False, stopping_criteria=[Changes()])
    plain = target.generate(**inputs, **options)
    computed.clear()
    draft = fixed(OneDrafts(plain, 0.0, 2, 128))
    assert torch.equal(target.generate(**inputs, **options, assistant_model=draft), plain)
    assert computed[0] == 4 * 3 and computed[-1] == 1


def test_after_a_warm_up_nothing_is_captured(monkeypatch):
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([5, 9, 4])
    target.generation_config.eos_token_id = None
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    target.generation_config.eos_token_id = int(plain[1, -NEW // 2])
    plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    model_state.forget(target)
    assert warm_up(target, batch_sizes=(3,), widths=(1, 2, 3, 5), max_length=64, prompt_tokens=(8,)) == 9
    monkeypatch.setattr(CapturedForward, "_capture", None)
    for siblings in (1, 3):
        draft = fixed(Uneven(plain, 0.8, 4 // siblings, 128, siblings))
        output = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
        assert torch.equal(output, plain)


def test_a_failed_packed_capture_is_named(monkeypatch):
    """Only packing ends: padded forwards are still captured, and the warning says so."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([5, 9, 3, 4, 6])
    target.generation_config.eos_token_id = None
    plain, warnings = target.generate(**inputs, max_new_tokens=NEW, do_sample=False), []
    make = CapturedForward.new_capture

    def fails(self, forward, tokens, late=None):
        if tokens == 8:  # no multiple of 5, so a packed one
            raise ZeroDivisionError("no capture")
        return make(self, forward, tokens, late)

    monkeypatch.setattr(CapturedForward, "new_capture", fails)
    monkeypatch.setattr(captured_forward.logger, "warning_once", warnings.append)
    draft = fixed(OneDrafts(plain, 1.0, 2, 128))
    assert torch.equal(target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), plain)
    assert warnings == ["drafts are padded, which is slower, because a forward could not be captured: no capture"]


def test_what_token_recycling_sees_of_ended_sequences(monkeypatch):
    """Nothing: a packed forward reads no token of theirs, so the table keeps what follows the last one."""
    target, inputs = enable_speculation(tiny_model("llama")), left_padded_batch([6, 9, 4, 7])
    target.generation_config.eos_token_id = 1000
    columns = inputs["input_ids"].shape[1] + 5

    class Ends(StoppingCriteria):
        def __call__(self, ids, scores, **options):
            return (torch.arange(len(ids)) == 2) & (ids.shape[1] >= columns)

    seen, observe = [], TokenRecycling.observe

    def noted(self, tokens, counts, logits):
        seen.extend(zip(self.sequences.live, counts.tolist()))
        observe(self, tokens, counts, logits)

    monkeypatch.setattr(TokenRecycling, "observe", noted)
    options = dict(max_new_tokens=NEW, do_sample=False, stopping_criteria=[Ends()])
    target.generate(**inputs, **options, assistant_model=fixed(TokenRecycling(candidates=2, max_tokens=2)))
    of_ended = [count for row, count in seen if row == 2]
    assert of_ended[0] >= 0 and set(of_ended[of_ended.index(-1) :]) == {-1}


def test_captures_are_charged_for_the_forward_that_is_made():
    """Few tokens before the end a capture does not pay, but one that is never made costs nothing."""

    def depths(seconds_of_packed, seconds_of_padded):
        latency = LatencyModel(free_captures=0)
        for width in PACKED_WIDTHS:
            latency.forward_seconds.add(width, 0.02 + 0.0005 * width)
        made = PackedLengthPolicy(
            8, 5, latency, {}, padded=padded, capture_seconds=lambda rows, columns: seconds_of_padded,
            packed=packed_width, packed_capture_seconds=lambda rows, tokens: seconds_of_packed,
        )  # fmt: skip
        made.has_drafted = True
        return made.depths([5] * 8)

    assert depths(0.0, 0.0) == depths(0.0, 0.3) and any(depths(0.0, 0.3))
    assert not any(depths(0.3, 0.0))


def test_a_sequence_that_lacks_one_token_takes_part():
    """It has no use for drafts, but a token of it is in the forward: one more fits into less padding."""
    counts = []
    for unfinished in (1, 2):  # the second sequence has ended, or lacks one token
        made = policy(2, 0.05)
        made.depths([50, 0], unfinished)
        proposal = drafted(0.8, 0.8)
        proposal.counts[1] = 0
        counts.append(made.trim(proposal).counts.tolist())
    assert counts == [[7, 0], [6, 0]]  # 8 tokens either way
