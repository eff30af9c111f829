"""The proposals of several drafters as one tree."""

from types import SimpleNamespace

import pytest
import torch
from draft_models import GREEDY, NEW, models

from hf_efficient import (
    BestOf,
    Drafter,
    PromptLookup,
    SelfSpeculation,
    Speculation,
    TokenRecycling,
    speculative_generate,
)
from hf_efficient.generation.drafters.best_of import _merge, _Trust
from hf_efficient.generation.speculation.token_tree import RowTree, proposal_of, trees_of


class Says(Drafter):
    """Always proposes `trees`, and notes what it is told."""

    max_tokens = 2

    def __init__(self, *trees: RowTree, confident: bool = True):
        self.trees, self.confident, self.told = list(trees), confident, []

    def begin(self, sequences, hidden=None):
        self.told.append(("begin", hidden))

    def propose(self, limits, nodes):
        assert max(limits) <= self.max_tokens
        proposal = proposal_of(self.trees, "cpu")
        if proposal is not None and not self.confident:
            proposal.confidence = None
        return proposal

    def accept(self, tokens, hidden=None):
        self.told.append(("accept", tokens, hidden))

    def select(self, rows):
        self.trees = [self.trees[row] for row in rows]


NOTHING = RowTree([], [], [])


def begun(*drafters: Drafter) -> BestOf:
    best = BestOf(*drafters)
    best.begin(SimpleNamespace(device="cpu", live=range(3)))
    return best


def test_a_token_of_two_drafters_is_one_node():
    first = RowTree([5, 6, 7], [-1, 0, -1], [0.6, 0.3, 0.2])  # 5, 5 6, 7
    second = RowTree([8, 5, 6, 9], [-1, -1, 1, 1], [0.5, 0.25, 0.2, 0.05])  # 8, 5, 5 6, 5 9
    best = begun(Says(first, NOTHING, NOTHING), Says(second, second, NOTHING))
    whole = best.propose([9, 9, 9], 63)
    merged, alone, none = trees_of(whole)
    # at the root 0.8 is named, 0.2 left: 8 is 0.2 * 0.5, 5 is 0.6 + 0.2 * 0.25. After 5: 6 is 0.5 + 0.5 * 0.8, 9 is 0.5
    # * 0.2
    assert merged.tokens == [5, 6, 7, 8, 9] and merged.parents == [-1, 0, -1, -1, 0]
    assert merged.confidence == pytest.approx([0.65, 0.65 * 0.9, 0.2, 0.1, 0.65 * 0.1])
    assert alone.tokens == second.tokens and alone.confidence == pytest.approx(second.confidence)
    assert none == NOTHING
    assert trees_of(best.propose([9, 9, 9], 2))[0].tokens == [5, 6]
    best.select([1])
    assert best.propose([9], 63).tokens.tolist() == [second.tokens]


def test_one_proposes_where_the_other_has_nothing():
    tree = RowTree([5, 6], [-1, 0], [0.5, 0.25])
    for drafters in ((Says(tree), Says(NOTHING)), (Says(NOTHING), Says(tree))):
        proposal = begun(*drafters).propose([2], 63)
        assert trees_of(proposal) == [tree] and proposal.parents is None
    assert begun(Says(NOTHING), Says(NOTHING)).propose([2], 63) is None


def test_certain_tokens_stay_behind_their_parents():
    best = begun(Says(RowTree([5, 6], [-1, 0], [1.0, 1.0])), Says(RowTree([7, 5, 6], [-1, -1, 1], [0.3, 0.3, 0.3])))
    (tree,) = trees_of(best.propose([2], 63))
    assert tree.tokens == [5, 6, 7] and tree.parents == [-1, 0, -1] and tree.confidence == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("nodes", [3, 8])
def test_siblings_of_more_than_one_in_all_leave_nothing_to_others(nodes):
    """Trust may scale them to that. What another drafter says comes last, parents before their children."""
    sure, chain = RowTree([1, 2], [-1, -1], [0.8, 0.6]), RowTree([3, 4, 5], [-1, 0, 1], [0.9, 0.8, 0.7])
    merged = _merge((sure, chain), nodes)
    assert merged.tokens == [1, 2, 3, 4, 5][:nodes] and merged.parents == [-1, -1, -1, 2, 3][:nodes]
    assert merged.confidence == [0.8, 0.6, 0.0, 0.0, 0.0][:nodes]


def test_no_token_is_believed_more_than_the_one_before_it():
    """Of a drafter that promises too little, whose probabilities are raised."""
    trust, rare = _Trust(), RowTree([1, 2], [-1, 0], [0.005, 0.005])
    for _ in range(6):
        trust.learn(RowTree([5], [-1], [0.2]), [5])
    first, second = trust.scaled(rare).confidence
    assert 0.005 < first == second < 0.01
    assert _merge((trust.scaled(rare),), 4) == RowTree([], [], [])


def test_each_drafter_is_given_what_it_reads():
    plain, reader = Says(NOTHING), Says(NOTHING)
    reader.reads_hidden = True
    best = BestOf(plain, reader)
    assert best.reads_hidden and not best.reads_logits and BestOf(plain, TokenRecycling()).reads_logits
    hidden = torch.ones(1, 2, 3)
    best.accept([[1]], hidden)
    assert plain.told == [("accept", [[1]], None)] and reader.told == [("accept", [[1]], hidden)]


def test_refusals():
    with pytest.raises(ValueError, match="at least two drafters, 1 given"):
        BestOf(PromptLookup())
    with pytest.raises(TypeError, match="'int' is none"):
        BestOf(PromptLookup(), 3)
    drawing = Says(NOTHING)
    drawing.draws = True
    with pytest.raises(ValueError, match="Says draws its tokens at random"):
        BestOf(PromptLookup(), drawing)
    unsure = Says(RowTree([5], [-1], [0.5]), confident=False)
    with pytest.raises(ValueError, match="Says does not say how sure it is"):
        begun(Says(NOTHING), unsure).propose([1], 63)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("name, attention", [("llama", "sdpa"), ("gemma3", "flash_paged"), ("opt", "eager")])
def test_greedy_output_is_that_of_plain_generation(name, attention, adaptive):
    model, _, inputs, plain = models(name)
    model.set_attn_implementation(attention)
    drafter = BestOf(PromptLookup(8), TokenRecycling(candidates=3, max_tokens=3))
    for _ in range(2):
        for batch, expected in zip(inputs, plain):
            output = model.generate(**batch, assistant_model=Speculation(drafter, adaptive=adaptive), **GREEDY)
            assert torch.equal(output, expected)


def test_sampled_text_does_not_depend_on_the_guesses():
    model, _, (batch, _), _ = models("llama")
    options = dict(**batch, max_new_tokens=NEW, do_sample=True, temperature=0.7, custom_generate=speculative_generate)
    drafter, texts = Speculation(BestOf(PromptLookup(8), TokenRecycling()), adaptive=False), []
    for draft in (PromptLookup(3), drafter, drafter):
        torch.manual_seed(5)
        texts.append(model.generate(**options, draft_model=draft))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_it_learns_which_drafter_serves_which_sequence():
    """The first drafter is right in one sequence, the second in the other: each comes first where it was right."""
    first, second = (RowTree([token], [-1], [0.6]) for token in (5, 7))
    drafter = BestOf(Says(first, first), Says(second, second))
    drafter.begin(SimpleNamespace(device="cpu", live=[0, 1]))
    assert drafter.propose([2, 2], 8).tokens.tolist() == [[5, 7], [5, 7]]
    for _ in range(6):
        drafter.accept([[5], [7]])
        proposal = drafter.propose([2, 2], 8)
    assert proposal.tokens.tolist() == [[5, 7], [7, 5]]
    assert proposal.confidence[0, 0] > 0.75 > 0.2 > proposal.confidence[0, 1]


def test_a_drafter_that_knows_its_depth_when_it_knows_the_model():
    model, _, (batch, _), (plain, _) = models("llama")
    best = Speculation(BestOf(SelfSpeculation(exit_layer=1, tree=4), PromptLookup()), adaptive=False)
    assert torch.equal(model.generate(**batch, **GREEDY, assistant_model=best), plain)
    assert best.draft.max_tokens == 20
