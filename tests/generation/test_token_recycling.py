"""Token recycling at the interface of a drafter, with a table whose entries are known."""

import pytest
import torch
from draft_models import GREEDY, NEW, fixed, models
from helpers import tiny_model
from test_drafters import append, sequences_of

from hf_efficient import PromptLookup, Speculation, TokenRecycling, speculative_generate


VOCABULARY = 128


def target(vocabulary: int = VOCABULARY):
    return tiny_model("llama", vocab_size=vocabulary)


def begin(rows: list[list[int]], drafter: TokenRecycling | None = None, **arguments):
    """Drafter and sequences; the last token of each row is the target's first."""
    drafter = drafter or TokenRecycling(**arguments)
    drafter.check(target())
    rows = torch.tensor(rows)
    sequences = sequences_of(rows[:, :-1], None, rows[:, -1])
    drafter.begin(sequences)
    return drafter, sequences


def logits_that_like(candidates: torch.Tensor) -> torch.Tensor:
    """candidates: int64 [..., k], the most probable first."""
    logits = torch.zeros(*candidates.shape[:-1], VOCABULARY)
    return logits.scatter_(-1, candidates, torch.arange(candidates.shape[-1], 0.0, -1).expand_as(candidates))


def teach(drafter: TokenRecycling, candidates: int, tokens=range(VOCABULARY)) -> torch.Tensor:
    """The most probable tokens after each of `tokens`, int64 [vocabulary, candidates], observed by `drafter`."""
    generator = torch.Generator().manual_seed(0)
    likely = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:candidates] for _ in range(VOCABULARY)])
    tokens = torch.tensor(list(tokens))[None]
    drafter.observe(tokens, torch.tensor([tokens.shape[1] - 1]), logits_that_like(likely[tokens]))
    return likely


def paths_of(proposal, row: int) -> list[tuple[int, ...]]:
    """From the root to each real node, in the order of the nodes."""
    tokens, parents = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
    paths = {-1: ()}
    for node in range(proposal.counts[row]):
        assert parents[node] < node
        paths[node] = (*paths[parents[node]], tokens[node])
    return list(paths.values())[1:]


def test_starts_from_the_prompt_alone():
    drafter, _ = begin([[1, 2, 3], [4, 5, 6]])
    assert drafter.propose([9, 9], 63) is None
    drafter, _ = begin([[1, 2, 3, 1], [4, 5, 6, 7]])
    proposal = drafter.propose([9, 9], 63)
    assert proposal.counts.tolist() == [6, 0]
    assert paths_of(proposal, 0)[-1] == (2, 3, 1, 2, 3, 1), "six tokens deep"
    assert drafter.propose([9, 9], 5).counts.tolist() == [5, 0]
    assert drafter.propose([2, 9], 63).counts.tolist() == [2, 0]
    assert drafter.propose([0, 9], 63) is None


def test_the_tree_is_grown_from_the_table():
    drafter, sequences = begin([[1, 2, 3], [4, 5, 6]], candidates=3, max_tokens=4)
    likely = teach(drafter, 3)
    full = drafter.propose([4, 2], 63)
    for row, limit in ((0, 4), (1, 2)):
        paths = paths_of(full, row)
        assert len(set(paths)) == len(paths) and max(map(len, paths)) == limit
        assert len(paths) == (63 if limit == 4 else 3 + 9)
        for path in paths:
            for before, token in zip((sequences.last(1)[row].item(), *path), path):
                assert token in likely[before]
        chances = full.confidence[row].tolist()
        assert chances == sorted(chances, reverse=True) and not any(chances[len(paths) :])
    assert paths_of(full, 0)[0] == (likely[3, 0],), "the most probable candidate comes first"
    part = drafter.propose([4, 2], 10)
    assert part.tokens.shape == (2, 10) and torch.equal(part.tokens[0], full.tokens[0, :10])


def test_unknown_tokens_have_no_children():
    drafter, _ = begin([[1, 2, 3], [4, 5, 6]], candidates=2, max_tokens=3)
    drafter.observe(torch.tensor([[3, 7]]), torch.tensor([1]), logits_that_like(torch.tensor([[[7, 8], [9, 10]]])))
    proposal = drafter.propose([9, 9], 63)
    assert proposal.counts.tolist() == [4, 0]
    assert set(paths_of(proposal, 0)) == {(7,), (8,), (7, 9), (7, 10)}


def test_learns_from_every_token_the_target_read_but_not_from_padding():
    drafter, _ = begin([[1, 2, 3], [4, 5, 6]], candidates=2)
    tokens = torch.tensor([[3, 20, 21], [6, 20, 22]])
    likely = torch.tensor([[[30, 31], [32, 33], [34, 35]], [[40, 41], [42, 43], [44, 45]]])
    drafter.observe(tokens, torch.tensor([2, 0]), logits_that_like(likely))
    table = drafter.table.tolist()
    assert [table[token] for token in (3, 20, 21, 6)] == [[30, 31], [32, 33], [34, 35], [40, 41]]
    assert table[22] == [-1, -1] and table[-1] == [-1, -1], "padding"
    # the same token twice in one row: the node that stands first is the likelier one
    drafter.observe(torch.tensor([[3, 3]]), torch.tensor([1]), logits_that_like(likely[:1, :2]))
    assert drafter.table[3].tolist() == [30, 31]


def test_the_tree_follows_the_ranks_that_were_right():
    drafter, sequences = begin([[1, 2, 3]], candidates=3, max_tokens=2)
    likely = teach(drafter, 3)
    first = drafter.propose([9], 3).confidence
    for _ in range(30):
        drafter.propose([9], 9)
        token = likely[sequences.last(1).item(), 2].item()  # always the third
        drafter.accept(append(sequences, torch.tensor([[token]])))
    drafter, sequences = begin([[1, 2, 3]], drafter)
    proposal = drafter.propose([9], 3)
    assert proposal.tokens[0, 0] == likely[3, 2] and proposal.confidence[0, 0] > 0.5 > first[0, 0]
    assert (drafter.trials[1] == 20).all(), "what comes two tokens deep was never seen"
    drafter.accept([[5]])
    drafter.accept([[6]])  # a step without a proposal teaches nothing
    assert drafter.trials[0, 0] == 20 + 30 + 1


def test_serves_one_vocabulary():
    drafter, _ = begin([[1, 2, 3]])
    table = teach(drafter, 8)
    with pytest.raises(ValueError, match="learned from a model of 128 tokens, LlamaForCausalLM has 64: make a new one"):
        drafter.check(target(64))
    assert torch.equal(drafter.table[:-1].long(), table)
    with pytest.raises(ValueError, match="candidates=65: the target has only 64 tokens"):
        TokenRecycling(65).check(target(64))


@pytest.mark.parametrize("arguments", [(0,), (2.0,), (True,), (8, 0), (8, None)])
def test_refuses_other_numbers(arguments):
    name = "candidates" if len(arguments) == 1 else "max_tokens"
    with pytest.raises(ValueError, match=f"{name}={arguments[-1]!r} .*expected an integer of at least 1"):
        TokenRecycling(*arguments)


@pytest.mark.parametrize(
    "name, attention",
    [
        *(("llama", attention) for attention in ("eager", "sdpa", "flash_paged")),
        ("mistral", "flash_paged"),
        ("gemma3", "sdpa"),
        ("opt", "eager"),
    ],
)
def test_greedy_output_is_that_of_plain_generation(name, attention):
    """Of one drafter over many runs: what it learned from other rows changes its guesses only."""
    model, _, inputs, plain = models(name)
    model.set_attn_implementation(attention)
    drafter, kept = TokenRecycling(candidates=2, max_tokens=3), []
    for adaptive in (False, True):
        for _ in range(2):
            for batch, expected in zip(inputs, plain):
                options = dict(**GREEDY, assistant_model=Speculation(drafter, adaptive=adaptive))
                output = model.generate(**batch, **options, return_dict_in_generate=True)
                assert torch.equal(output.sequences, expected)
                kept.append(output.tokens_per_step)
    assert min(kept[2:4]) > 1.15, "the second run knows the tokens of the first"


def test_sampled_text_does_not_depend_on_the_guesses():
    model, _, (batch, _), _ = models("llama")
    options = dict(**batch, max_new_tokens=NEW, do_sample=True, temperature=0.7, custom_generate=speculative_generate)
    texts, drafter = [], TokenRecycling()
    for draft in (PromptLookup(3), drafter, drafter):
        torch.manual_seed(5)
        draft = fixed(draft)
        output = model.generate(**options, draft_model=draft, return_dict_in_generate=True)
        texts.append(output.sequences)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert output.tokens_per_step > 1.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype):
    model, _, (batch, _), (plain, _) = models("llama")
    torch.set_default_dtype(dtype)
    try:
        for _ in range(2):
            assert torch.equal(model.generate(**batch, **GREEDY, assistant_model=fixed(TokenRecycling())), plain)
    finally:
        torch.set_default_dtype(torch.float32)


def test_inference_mode_and_calls_outside_it():
    model, _, (batch, _), (plain, _) = models("llama")
    with torch.inference_mode():
        drafter = fixed(TokenRecycling())
    for inside in (True, False):
        with torch.inference_mode(inside):
            assert torch.equal(model.generate(**batch, **GREEDY, assistant_model=drafter), plain)
