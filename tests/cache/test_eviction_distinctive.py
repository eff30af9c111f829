"""Distinctive against its definition, and what it is for: a key that no query expects survives, where keys differ."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_config
from kv_models import attend

from hf_efficient import AdaKV, Distinctive, EvictionPolicy, ExpectedAttention, PagedCache
from hf_efficient.cache.eviction.base import View
from hf_efficient.cache.eviction.rotary import Rotary


HEADS, DIM, LENGTH = 2, 16, 40
CONFIG = tiny_config("llama", num_hidden_layers=1, attn_implementation="flash_paged")


def ragged_view():
    """Two sequences; the heads hold 40, 31, 17 and 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, HEADS, LENGTH, DIM, generator=generator) for _ in range(2))
    columns = torch.arange(LENGTH)
    return View(
        keys=keys + 0.5,
        values=values,
        key_positions=columns.expand(2, HEADS, -1),
        present=columns < torch.tensor([[40, 31], [17, 40]])[..., None],
        queries=torch.randn(2, 2 * HEADS, LENGTH, DIM, generator=generator),
        query_positions=columns.expand(2, -1),
        softmax_scale=DIM**-0.5,
        softcap=0.0,
        budgets=[20, 20],
        accumulated=None,
        rotate=Rotary(CONFIG),
    )


def ranks(scores):
    """1 for the highest, 1/n for the lowest; of equals the first is higher."""
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    return [1 - order.index(token) / len(scores) for token in range(len(scores))]


@pytest.mark.parametrize("weight", [0, 0.71, 1])
def test_scores_are_the_differences_of_the_keys_in_the_order_of_worth(weight):
    view = ragged_view()
    scores, attention = Distinctive(weight).score(view), ExpectedAttention().score(view)
    for b in range(2):
        for head in range(HEADS):
            number = int(view.present[b, head].sum())
            keys = view.rotate(view.keys[b, head, :number], -torch.arange(number))
            keys = F.normalize(keys, dim=-1)
            difference = -F.cosine_similarity(keys, keys.mean(0, keepdim=True))
            expected = attention[b, head, :number].tolist()
            worth = [max(a, weight * d) for a, d in zip(ranks(expected), ranks(difference.tolist()))]
            order = sorted(range(number), key=lambda token: -round(worth[token], 6))  # equals in the order of the text
            own = scores[b, head]
            torch.testing.assert_close(own[order], difference.sort(descending=True).values)
            assert own[number:].eq(float("-inf")).all()


@pytest.mark.parametrize("scorer, survives", [(ExpectedAttention, False), (Distinctive, True)])
def test_a_key_that_stands_apart_is_found_when_asked_for(scorer, survives):
    """The keys of head 0 point one way before they are rotated, but for one that no query looks at; those of head 1 are
    all but the same."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedCache(CONFIG, block_size=8, eviction=EvictionPolicy(AdaKV(scorer(recent=8), floor=0.5), 0.5))
    keys, values, queries = (torch.randn(1, heads, 64, DIM, generator=generator) for heads in (HEADS, HEADS, 2 * HEADS))
    direction = F.normalize(torch.ones(DIM), dim=0)
    keys = keys * torch.tensor([0.5, 0.01])[:, None, None] + 4 * direction
    keys[0, 0, 30] = -4 * direction
    rotary, positions = Rotary(CONFIG), torch.arange(64)
    keys = rotary(keys, positions)
    attend(cache, rotary(queries * 0.1 + direction, positions), keys, values)
    lengths = cache.layers[0].store.pool.lengths
    assert sum(lengths) == 64 and (lengths[0] > lengths[1]) == survives
    asked = keys[0, 0, 30].mul(5).expand(1, 2 * HEADS, 1, DIM)  # logit 20 for the key, and none above 5 for the others
    answer = attend(cache, asked, keys[:, :, :1], values[:, :, :1])[0, 0, 0]
    assert torch.allclose(answer, values[0, 0, 30], atol=1e-4) == survives


@pytest.mark.parametrize("weight", [-0.1, 1.1, True, "0.7"])
def test_a_weight_must_be_a_number_from_0_to_1(weight):
    with pytest.raises(ValueError, match="weight="):
        Distinctive(weight)
