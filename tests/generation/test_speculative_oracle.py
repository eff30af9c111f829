"""With a drafter whose acceptance is forced, tokens per step are what theory says they are.

A step of a row that drafts g tokens and has room for them gives K tokens, P(K >= j) = a^(j - 1) for j = 1..g + 1, and
steps do not depend on each other. The mean of n of them must lie within 3.29 standard deviations of E[K] = (1 -
a^(g+1)) / (1 - a), an interval of 99.9 % confidence (fixed seeds: it is the same every time). Steps cut short by the
end of a row are left out; whether a step is one of those is known before it, so the others are not biased (Wald)."""

import functools
import math

import pytest
import torch
from draft_models import fixed
from helpers import tiny_model
from oracle import Oracle

from hf_efficient import enable_speculation


NEW = {1: 320, 4: 160, 16: 80}  # batch -> tokens generated a row


class Recording(Oracle):
    """Notes of every step that had room for all drafts what the row gained, and what it should have."""

    def begin(self, sequences, hidden=None):
        super().begin(sequences, hidden)
        self.gained, self.promised, self.limits = [], [], []

    def propose(self, limits, nodes):
        self.limits = limits
        return super().propose(limits, nodes)

    def accept(self, tokens, hidden=None):
        for row, limit in enumerate(self.limits):
            if limit >= self.max_tokens:
                self.gained.append(len(tokens[row]))
                self.promised.append(1 + int(self.right[row].int().cumprod(0).sum()))
        self.limits = []  # a step in which no row has room for a draft asks for none


@functools.cache
def target_and_output():
    """The model and its plain greedy continuations of 16 prompts."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    target = tiny_model("llama", **sizes, max_position_embeddings=512, eos_token_id=None, pad_token_id=None)
    prompts = torch.randint(3, 128, (16, 6), generator=torch.Generator().manual_seed(0))
    plain = target.generate(prompts, max_new_tokens=max(NEW.values()), do_sample=False)
    return enable_speculation(target), plain


@pytest.mark.parametrize(  # all pairs of any two
    "acceptance, depth, batch, siblings",
    [
        (acceptance, depth, [*NEW][(i + j + siblings // 3) % 3], siblings)
        for i, acceptance in enumerate((0.6, 0.8, 0.9))
        for j, depth in enumerate((3, 5, 7))
        for siblings in (1, 3)  # a chain, a tree
    ],
)
def test_tokens_per_step(acceptance, depth, batch, siblings):
    target, plain = target_and_output()
    expected = plain[:batch, : 6 + NEW[batch]]
    oracle = Recording(expected, acceptance, depth, 128, siblings)
    options = dict(max_new_tokens=NEW[batch], do_sample=False, return_dict_in_generate=True)
    output = target.generate(plain[:batch, :6], **options, assistant_model=fixed(oracle))
    assert torch.equal(output.sequences, expected)
    assert oracle.gained == oracle.promised, "a step gives the right drafts before the first wrong one, and one token"

    steps = len(oracle.gained)
    mean = (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    variance = sum((2 * j - 1) * acceptance ** (j - 1) for j in range(1, depth + 2)) - mean**2
    interval = 3.29 * math.sqrt(variance / steps)
    assert abs(sum(oracle.gained) / steps - mean) < interval, (steps, mean, interval)
    assert interval < 0.25 * mean, "enough steps to tell"
    for place, share in enumerate(output.acceptance_by_position, 1):
        right = acceptance**place
        # a binomial share of at least `steps` trials, within 4 standard deviations (99.994 %)
        assert abs(share - right) < 4 * math.sqrt(right * (1 - right) / steps), place
    assert output.tokens_per_step == pytest.approx((NEW[batch] - 1) * batch / output.row_steps.sum().item())
