"""Eviction against a dense reference: every paper's score computed from its definition, over plain lists of tokens."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_config
from kv_models import attend
from table import SCORERS

from hf_efficient import AdaKV, EvictionPolicy, HeavyHitter, PagedCache
from hf_efficient.cache.stores import evicting


BATCH, KEY_HEADS, GROUP, DIM, BLOCK, THETA = 2, 2, 2, 16, 8, 10000.0


def rotated(x, positions):
    """Rotary embedding of x [..., n, D] by definition: pairs (i, i + D / 2) turn by position * theta ** (-2 i / D)."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None] * THETA ** (-torch.arange(half).double() / half)
    first, second = x.double()[..., :half], x.double()[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1
    ).float()


def softmax_over(keys, key_positions, query, position):
    """Probabilities of one query over the keys [n, D] that stand no later."""
    logits = (keys @ query) / math.sqrt(DIM)
    return logits.masked_fill(key_positions > position, float("-inf")).softmax(0)


class Reference:
    """One sequence: per key head a list of kept positions, and everything ever given. queries [Hq, n, D]."""

    def __init__(self, name, budget, when):
        self.name, self.budget, self.when = name, budget, when
        self.kept = [torch.empty(0, dtype=torch.long) for _ in range(KEY_HEADS)]
        self.sums = [torch.empty(0) for _ in range(KEY_HEADS)]
        self.queries = torch.empty(KEY_HEADS * GROUP, 0, DIM)
        self.keys = self.values = torch.empty(KEY_HEADS, 0, DIM)
        self.first_query = 0  # of the latest run of queries, which the scorer may see
        self.moved = 0  # how far the sinks of SinkWindow have been moved on

    def forward(self, query, key, value):
        """Output [n, Hq, D] of the new tokens [H, n, D], and what follows after them."""
        start, width = self.keys.shape[1], key.shape[1]
        self.queries = torch.cat([self.queries, query], 1)
        self.keys, self.values = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
        new = torch.arange(start, start + width)
        watched = self.when == "always" or start == 0 or width > 16
        output = torch.empty(width, KEY_HEADS * GROUP, DIM)
        for head in range(KEY_HEADS):
            self.kept[head] = torch.cat([self.kept[head], new])
            self.sums[head] = torch.cat([self.sums[head], torch.zeros(width)])
            keys = self.keys[head][self.kept[head]]
            if self.moved:
                keys[:4] = rotated(keys[:4], torch.full((4,), self.moved))
            for group in range(head * GROUP, (head + 1) * GROUP):
                for i in range(width):
                    weights = softmax_over(keys, self.kept[head], query[group, i], start + i)
                    output[i, group] = weights @ self.values[head][self.kept[head]]
                    self.sums[head] += weights * watched
        if not watched:
            self.first_query = start + width
        else:
            target = math.ceil(self.budget * (start + width)) if self.budget < 1 else self.budget
            self.evict(target, 0 if start == 0 or width > 16 else width)
        return output

    def evict(self, target, last):
        seen = self.keys.shape[1]
        if sum(map(len, self.kept)) <= KEY_HEADS * target:
            return
        sinks, recent = {"SinkWindow": (4, 1), "ExpectedAttention": (4, 16), "SnapKV": (0, 8)}.get(
            self.name.removeprefix("AdaKV "), (0, 16)
        )
        number = max(target - BLOCK + 1, sinks + recent) if self.when == "always" else target
        recent = {"SinkWindow": number - 4, "HeavyHitter": max(16, number // 2)}.get(
            self.name.removeprefix("AdaKV "), recent
        )
        recent = max(recent, min(last, number - sinks))
        scores = [self.score(head) for head in range(KEY_HEADS)]
        if self.name == "TOVA":
            scores = [sum(scores) / KEY_HEADS] * KEY_HEADS
        for head, kept in enumerate(self.kept):
            scores[head][(kept < sinks) | (kept >= seen - recent)] = float("inf")
        counts = [number] * KEY_HEADS
        if self.name.startswith("AdaKV"):
            firsts = [score.argsort(descending=True)[: int(0.2 * number)] for score in scores]
            for score, first in zip(scores, firsts):
                score[first] = float("inf")
            best = torch.cat(scores).argsort(descending=True)[: KEY_HEADS * number]
            counts = [int((best < len(scores[0])).sum()), int((best >= len(scores[0])).sum())]
        for head, (score, count) in enumerate(zip(scores, counts)):
            chosen = score.argsort(descending=True)[:count].sort().values
            self.kept[head], self.sums[head] = self.kept[head][chosen], self.sums[head][chosen]
        if self.name == "SinkWindow":
            self.moved = seen - number

    def score(self, head):
        kept, seen = self.kept[head], self.keys.shape[1]
        keys, heads = self.keys[head][kept], range(head * GROUP, (head + 1) * GROUP)
        name = self.name.removeprefix("AdaKV ")
        if name == "SinkWindow":
            return kept.float()
        if name == "KeyNorm":
            return -keys.square().sum(1)
        if name == "HeavyHitter":
            return self.sums[head].clone()
        if name == "TOVA":
            return sum(softmax_over(keys, kept, self.queries[g, -1], seen) for g in heads) / GROUP
        if name == "SnapKV":
            pooled = torch.zeros(len(kept))
            for group in heads:
                last = range(max(self.first_query, seen - 8), seen)
                mean = sum(softmax_over(keys, kept, self.queries[group, p], p) for p in last) / len(last)
                pooled += torch.tensor([mean[max(0, i - 2) : i + 3].sum() / 5 for i in range(len(kept))])
            return pooled / GROUP
        first = max(4, self.first_query, seen - 32)
        turns = [rotated(torch.eye(DIM), torch.full((DIM,), p)) for p in range(seen, seen + 16)]
        turn, total = sum(turns) / 16, 0
        for group in heads:
            queries = rotated(self.queries[group, first:], -torch.arange(first, seen)) @ turn
            spread = torch.cov(queries.T, correction=0)
            logits = keys @ queries.mean(0) / math.sqrt(DIM)
            logits += torch.einsum("ni,ij,nj->n", keys, spread, keys) / DIM / 2
            logits[:4] = float("-inf")
            total = total + logits.softmax(0)
        return total / GROUP * self.values[head][kept].norm(dim=1)


DEFINED = {name: scorer for name, scorer in SCORERS.items() if name != "Distinctive"}
DEFINED["AdaKV HeavyHitter"] = AdaKV(HeavyHitter(recent=16))


def check_storage(cache, references):
    """The tokens that are stored are those of the references, and no block more is in use than they need."""
    store = cache.layers[0].store
    lengths = [len(kept) for reference in references for kept in reference.kept]
    assert store.pool.lengths == lengths
    assert store.pool.capacity - store.pool.num_free == sum(-(-length // BLOCK) for length in lengths)
    plan = SimpleNamespace(contiguous_span=None, lengths=lengths, max_length=max(lengths))
    table = [row + [0] * (max(map(len, store.pool.tables)) - len(row)) for row in store.pool.tables]
    plan.block_table = lambda device: torch.tensor(table)
    keys, values = store.store.read(plan)
    for row, length in enumerate(lengths):
        reference, head = references[row // KEY_HEADS], row % KEY_HEADS
        kept, sinks = reference.kept[head], 4 if reference.moved else 0
        assert torch.equal(keys[row, 0, sinks:length], reference.keys[head][kept][sinks:])
        assert torch.equal(values[row, 0, :length], reference.values[head][kept])
        moved = rotated(reference.keys[head][kept[:sinks]], torch.full((sinks,), reference.moved))
        torch.testing.assert_close(keys[row, 0, :sinks], moved, rtol=0, atol=1e-5)  # float32 sines


@pytest.mark.parametrize("budget, when", [(0.5, "prefill"), (24, "prefill"), (28, "always"), (0.6, "always")])
@pytest.mark.parametrize("name", DEFINED)
def test_what_is_kept_and_attended_equals_the_definition(name, budget, when, monkeypatch):
    monkeypatch.setattr(evicting, "_PROMPT", 16)
    config = tiny_config("llama", num_hidden_layers=1, attn_implementation="flash_paged")
    cache = PagedCache(config, block_size=BLOCK, eviction=EvictionPolicy(DEFINED[name], budget, when))
    references = [Reference(name, budget, when) for _ in range(BATCH)]
    generator = torch.Generator().manual_seed(1)
    for width in (48, *[1] * 12, 5, 20, *[1] * 9):
        query, key, value = (
            torch.randn(BATCH, heads, width, DIM, generator=generator) * 1.5
            for heads in (KEY_HEADS * GROUP, KEY_HEADS, KEY_HEADS)
        )
        output = attend(cache, query, key, value)
        expected = torch.stack([r.forward(*new) for r, *new in zip(references, query, key, value)])
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)  # float32, sums of 100 products
        check_storage(cache, references)
        seen = references[0].keys.shape[1]
        if when == "always":
            target = budget if budget > 1 else math.ceil(budget * seen)
            assert all(sum(map(len, r.kept)) <= KEY_HEADS * target for r in references)
    assert cache.cache_seqlens == [94] * BATCH and max(len(kept) for kept in references[0].kept) < 94
