"""Drafts of unequal length are verified without padding, one draft length a sequence, and the output stays the same."""

import pytest
import torch
from draft_models import fixed
from helpers import left_padded_batch, tiny_model
from oracle import Oracle

from hf_efficient import EagleHead, TokenRecycling, enable_speculation
from hf_efficient.generation import model_state
from hf_efficient.generation.loop import SpeculativeLoop
from hf_efficient.generation.replay.captured_forward import PACKED_WIDTHS, packed_width
from hf_efficient.generation.speculation.latency_model import LatencyModel
from hf_efficient.generation.speculation.packed_length import PackedLengthPolicy
from hf_efficient.generation.speculation.proposal import Proposal


NEW = 24


class Uneven(Oracle):
    """Drafts fewer tokens for some sequences, of some none."""

    computes = False

    def propose(self, limits, nodes):
        proposal = super().propose(limits, nodes)
        if proposal is not None:
            proposal.counts = torch.minimum(proposal.counts, torch.arange(len(limits)) * self.siblings % 9)
        return proposal


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
