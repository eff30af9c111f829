"""Token trees: several continuations in one forward, one of them kept, and the output of plain generation."""

import draft_models
import numpy as np
import pytest
import torch
from draft_models import GREEDY, NEW, Observer, fixed, models
from helpers import TINY_MODELS, left_padded_batch, tiny_model

from hf_efficient import (
    PagedCache,
    PrefixCache,
    Speculation,
    TypicalAcceptance,
    enable_speculation,
    speculative_generate,
)
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.token_tree import ancestors, best_first, spine_first, trees_of
from hf_efficient.generation.speculation.verification import verify


llama = pytest.fixture(draft_models.llama)


class Tree(Observer):
    """Knows what plain generation says (`known`: int64 [batch, columns]) and hides it among wrong tokens: at every
    level two or three siblings, the right one at a random place and sometimes missing, and each has children."""

    max_tokens = 4

    def __init__(self, known: torch.Tensor):
        self.known = torch.nn.functional.pad(known, (0, 8))

    def begin(self, sequences, hidden=None):
        super().begin(sequences)
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, limits, nodes):
        rows = [
            self._row(b, length, limit) for b, length, limit in zip(self.sequences.live, self.sequences.lengths, limits)
        ]
        width = max(len(tokens) for tokens, _ in rows)
        if width == 0:
            return None
        tokens, parents = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -1)
        for row, (own, above) in enumerate(rows):
            tokens[row, : len(own)], parents[row, : len(own)] = torch.tensor(own), torch.tensor(above)
        return Proposal(tokens, torch.tensor([len(own) for own, _ in rows]), parents=parents)

    def _row(self, b, length, limit):
        tokens, parents, level = [], [], [-1]
        for depth in range(min(limit, 3)):
            right, level_below = int(self.known[b, length + depth]), []
            for parent in level[:2]:
                wrong = [(right + 1 + n) % 128 for n in torch.randperm(20, generator=self.generator)[:2].tolist()]
                siblings = wrong[:1] + [right] + wrong[1:] if torch.rand((), generator=self.generator) < 0.8 else wrong
                for token in siblings:
                    level_below.append(len(tokens))
                    tokens.append(token)
                    parents.append(parent)
            order = torch.randperm(len(level_below), generator=self.generator).tolist()
            level = [level_below[i] for i in order]
        return tokens, parents


@pytest.mark.parametrize(  # transformers offers no SDPA for Gemma 2 and gpt-oss, at even places
    "name, attention",
    [(name, "flash_paged") for name in TINY_MODELS]
    + [(name, ("eager", "sdpa")[i % 2]) for i, name in enumerate(TINY_MODELS)],
)
def test_greedy_output_is_that_of_plain_generation(name, attention):
    target, _, inputs, plain = models(name)
    target.set_attn_implementation(attention)
    for batch, expected in zip(inputs, plain):
        wanted = dict(return_dict_in_generate=True, output_scores=True)
        output = target.generate(**batch, **GREEDY, **wanted, assistant_model=fixed(Tree(expected)))
        assert torch.equal(output.sequences, expected)
        assert output.tokens_per_step > 1.3, "paths of the tree are kept"
        for step, scores in enumerate(output.scores):
            live = (expected[:, -NEW:][:, :step] != 2).all(1)
            assert torch.equal(scores.argmax(-1)[live], expected[:, -NEW:][:, step][live])


@pytest.mark.parametrize("options", [{}, {"kv_format": "int8"}, {"kv_format": "int4"}, {"prefix_cache": True}])
def test_caches_keep_one_path_of_a_tree(options, llama):
    """What comes after many trees is what comes after plain generation with the same cache; int4 takes chains only."""
    target, _, batch, _ = llama
    target.set_attn_implementation("flash_paged")
    options = {**options, "prefix_cache": PrefixCache(target, 64)} if "prefix_cache" in options else options
    expected = target.generate(**batch, past_key_values=PagedCache(target.config, **options), max_new_tokens=NEW)
    cache, draft = PagedCache(target.config, **options), fixed(Tree(expected))
    output = target.generate(**batch, past_key_values=cache, assistant_model=draft, max_new_tokens=NEW)
    assert torch.equal(output, expected)
    assert cache.takes_trees == (options.get("kv_format") != "int4")


def test_a_tree_is_a_chain_where_processors_read_ids(llama):
    target, _, batch, _ = llama
    options = dict(**batch, max_new_tokens=NEW, repetition_penalty=1.5)
    expected = target.generate(**options)
    assert torch.equal(target.generate(**options, assistant_model=fixed(Tree(expected))), expected)


def test_a_seed_gives_the_same_text_whatever_is_drafted(llama):
    target, draft, batch, plain = llama
    options = dict(**batch, max_new_tokens=NEW, do_sample=True, temperature=1.3, custom_generate=speculative_generate)
    texts = []
    for drafter in (Tree(plain), Tree(torch.randint(3, 128, (3, 40)))):
        for adaptive in (True, False):
            torch.manual_seed(3)
            texts.append(target.generate(**options, draft_model=Speculation(drafter, adaptive=adaptive)))
    assert all(torch.equal(text, texts[0]) for text in texts)
    torch.manual_seed(4)
    assert not torch.equal(target.generate(**options, draft_model=Tree(plain)), texts[0])


def test_a_tree_that_does_not_branch_is_a_chain():
    tokens, counts = torch.arange(6).view(2, 3), torch.tensor([3, 1])
    straight = Proposal(tokens, counts, None, torch.tensor([[-1, 0, 1], [-1, -1, -1]]), torch.ones(2, 3))
    assert straight.simplest().parents is None and straight.simplest().confidence is straight.confidence
    branched = Proposal(tokens, torch.tensor([3, 2]), None, straight.parents)
    assert branched.simplest() is branched


def test_ancestors():
    parents = torch.tensor([[-1, -1, 0, 2, 1]])
    assert ancestors(parents)[0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_greedy_walks_down_the_tree():
    choice = torch.tensor([[4, 5, 0, 7, 1, 9], [4, 5, 0, 7, 1, 9]])
    scores = torch.nn.functional.one_hot(choice, 10).float()
    proposal = Proposal(
        torch.tensor([[3, 4, 0, 9, 7], [4, 3, 5, 8, 6]]),
        torch.tensor([5, 3]),
        parents=torch.tensor([[-1, -1, 1, 2, 2], [-1, -1, 0, 2, 2]]),
    )
    tokens, accepted, path = verify(scores, proposal)
    # row 0: 4 is node 1, after it 0 is node 2, after which 7 (node 4) is said; row 1: 4 is node 0, then 5 is node 2
    assert accepted.tolist() == [3, 2]
    assert tokens[0, :4].tolist() == [4, 0, 7, 9] and path[0, :3].tolist() == [1, 2, 4]
    assert tokens[1, :3].tolist() == [4, 5, 7] and path[1, :2].tolist() == [0, 2]
    assert proposal.chain().tokens[1, :2].tolist() == [4, 5] and proposal.chain().counts.tolist() == [1, 2]


def test_typical_acceptance_keeps_the_longest_plausible_path():
    probabilities = torch.full((1, 4, 5), 0.01)
    probabilities[0, 0] = torch.tensor([0.5, 0.4, 0.08, 0.01, 0.01])
    probabilities[0, 1] = torch.tensor([0.9, 0.05, 0.03, 0.01, 0.01])
    probabilities[0, 2] = torch.tensor([0.9, 0.05, 0.03, 0.01, 0.01])
    proposal = Proposal(torch.tensor([[0, 1, 0]]), torch.tensor([3]), parents=torch.tensor([[-1, -1, 1]]))
    scores = probabilities.log()
    assert verify(scores, proposal).accepted.tolist() == [1], (
        "greedy takes the likelier first token, which has no child"
    )
    tokens, accepted, _ = verify(scores, proposal, acceptance=TypicalAcceptance())
    assert accepted.tolist() == [2] and tokens[0, :2].tolist() == [1, 0]
    for arguments in ((0,), (0.3, 2), (True,)):
        with pytest.raises(ValueError, match="must be a number above 0 and at most 1"):
            TypicalAcceptance(*arguments)


def test_trees_are_refused_where_a_cache_cannot_keep_one_path():
    cache = PagedCache(tiny_model("llama").config, kv_format="int2")
    with pytest.raises(ValueError, match="kv_format='int2'"), cache.token_tree(torch.ones(1, 2, 2)):
        pass


def test_other_types_of_options_are_refused():
    model = enable_speculation(tiny_model("llama"))
    batch = left_padded_batch()
    with pytest.raises(TypeError, match="adaptive=1: expected True or False"):
        Speculation(model, adaptive=1)
    with pytest.raises(TypeError, match="acceptance='str': expected a TypicalAcceptance or None"):
        model.generate(**batch, assistant_model=Speculation(model, "typical"), max_new_tokens=2)


def test_a_spine_is_the_tree_whose_first_guesses_alone_go_on():
    chances = np.sort(np.random.default_rng(0).random((3, 4, 5), np.float32))[..., ::-1].copy()
    tokens = np.arange(60).reshape(3, 4, 5)
    likely = np.concatenate([np.ones((3, 1), np.float32), chances[:, :-1, 0].cumprod(1)], 1)
    depths = np.arange(1, 5).repeat(5)
    parents = np.broadcast_to(np.maximum((depths - 2) * 5, -1), (3, 20))
    candidates = tokens.reshape(3, 20), (chances * likely[..., None]).reshape(3, 20), parents, depths
    for limits, nodes in (([4, 4, 4], 63), ([3, 0, 4], 6), ([1, 1, 0], 3)):
        expected = trees_of(best_first(*candidates, limits, nodes, "cpu"))
        for tree, other in zip(trees_of(spine_first(tokens, chances, limits, nodes, "cpu")), expected, strict=True):
            assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
            assert tree.confidence == pytest.approx(other.confidence, rel=1e-6)
    chances[:, 1:] = np.nan
    assert spine_first(tokens, chances, [4, 4, 4], 63, "cpu").width == 5
    assert spine_first(tokens, chances[:, 1:], [4, 4, 4], 63, "cpu") is None
