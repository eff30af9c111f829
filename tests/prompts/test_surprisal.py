"""Surprise after a growing context: against one forward without a cache."""

import math

import pytest
import torch
from helpers import tiny_model

from hf_efficient.prompts.surprisal import Context, surprisal_after


TOKENS = torch.randint(3, 128, (120,), generator=torch.Generator().manual_seed(1)).tolist()
HEAD = [1]


def expected(model, tokens: list[int]) -> torch.Tensor:
    """-log p of all tokens but the first, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


@pytest.mark.parametrize("head", [[], HEAD])
@pytest.mark.parametrize("positions", [None, 256, 121])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@torch.no_grad()
def test_segments_give_what_one_forward_gives(name, positions, head):
    model = tiny_model(name)
    context, found = Context(model, head, positions), []
    for start in range(0, len(TOKENS), 17):
        found.append(context.surprisal(TOKENS[start : start + 17]))
        context.extend(TOKENS[start : start + 17])
    found = torch.cat(found).double()
    one = expected(model, head + TOKENS)
    if not head:
        assert found[0].item() == pytest.approx(math.log(model.config.vocab_size), rel=1e-6)
        found = found[1:]
    torch.testing.assert_close(found, one, atol=2e-4, rtol=1e-4)  # float32 sums in another order


@torch.no_grad()
def test_only_what_was_kept_is_context():
    model = tiny_model("llama")
    context = Context(model, HEAD, None)
    context.surprisal(TOKENS[:40])
    context.extend(TOKENS[:40:3])
    found = context.surprisal(TOKENS[40:60]).double()
    one = expected(model, HEAD + TOKENS[:40:3] + TOKENS[40:60])[-20:]
    torch.testing.assert_close(found, one, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_past_the_positions_the_oldest_tokens_are_forgotten():
    model = tiny_model("llama", max_position_embeddings=32)
    context = Context(model, HEAD, 32)
    context.extend(TOKENS[:100])
    found = context.surprisal(TOKENS[100:110]).double()
    kept = len(context.tokens)
    assert 0 < kept <= 21 and context.tokens == TOKENS[100 - kept : 100]
    torch.testing.assert_close(found, expected(model, HEAD + TOKENS[100 - kept : 110])[-10:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("head", [[], HEAD])
@torch.no_grad()
def test_texts_of_different_lengths_at_once(head):
    model = tiny_model("llama")
    texts, tokens = [TOKENS[:5], TOKENS[5:60], [], TOKENS[60:61]], TOKENS[100:107]
    found = surprisal_after(model, texts, tokens, head, None)
    for value, text in zip(found, texts):
        if head + text:
            assert value == pytest.approx(expected(model, head + text + tokens)[-7:].mean().item(), rel=1e-4)


@torch.no_grad()
def test_of_a_text_too_long_the_end_is_read():
    model = tiny_model("llama", max_position_embeddings=32)
    [found] = surprisal_after(model, [TOKENS[:100]], TOKENS[100:107], HEAD, 32)
    assert found == pytest.approx(expected(model, HEAD + TOKENS[76:107])[-7:].mean().item(), rel=1e-4)


@pytest.mark.parametrize("head", [[], HEAD])
@torch.no_grad()
def test_more_tokens_than_positions_are_judged_in_parts(head):
    """gpt2 has no embedding for a position too many."""
    model = tiny_model("gpt2", max_position_embeddings=32)
    context = Context(model, head, 32)
    found = context.surprisal(TOKENS[:100]).double()
    room = 32 - len(head)
    step = room // 2
    for stop in (step, 4 * step, 100):  # in the middle of the text half of the positions are context
        begin = 0 if stop == step else (100 - 100 % step + step if stop == 100 else stop) - room
        one = expected(model, head + TOKENS[begin:stop])
        torch.testing.assert_close(found[stop - 4 : stop], one[-4:], atol=2e-4, rtol=1e-4)
    assert len(found) == 100
