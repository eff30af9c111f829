"""The most probable guesses of several drafters, in one tree."""

import functools

import torch

from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.token_tree import RowTree, proposal_of, trees_of


_MIN_CONFIDENCE = 0.01  # less probable guesses are left out: merging them takes more time than they save
# What a drafter promised a sequence and what came of it are multiplied by this in each step; at first they weigh as
# much as so many tokens.
_DECAY, _PRIOR_TOKENS = 0.9, 3.0


class BestOf(Drafter):
    """Merges the proposals of several drafters into one tree of the most probable nodes. A token that several drafters
    propose at the same node is one node. `BestOf(PromptLookup(), TokenRecycling())` copies where the text repeats
    itself, and proposes common continuations elsewhere (Hu et al. 2024, "SAM Decoding", fall back in this way when the
    match is short).

    Let b be the probability that a drafter gives a token after some node, a the probability that the drafters before it
    give it, and s the sum over all tokens that those propose there. The token then has the probability a + (1 - s) b.

    The weight of each drafter is learned in each sequence from the tokens that followed its proposals.

    Args:
        drafters: at least two, the most reliable first. Their proposals must have `Proposal.confidence`.

    Raises:
        TypeError: an argument is no `Drafter`.
        ValueError: fewer than two drafters, or one that samples its tokens; at the first proposal without confidence.
    """

    def __init__(self, *drafters: Drafter):
        if len(drafters) < 2:
            raise ValueError(f"BestOf takes at least two drafters, {len(drafters)} given")
        for drafter in drafters:
            if not isinstance(drafter, Drafter):
                raise TypeError(f"BestOf takes drafters, {type(drafter).__name__!r} is none")
            if drafter.draws:
                raise ValueError(f"{type(drafter).__name__} draws its tokens at random: BestOf cannot merge them")
        self.drafters = drafters
        self._trees: list[list[RowTree] | None] = [None] * len(drafters)  # of this step
        self.relative_cost = sum(drafter.relative_cost for drafter in drafters)
        self.computes = any(drafter.computes for drafter in drafters)
        self.reads_hidden = any(drafter.reads_hidden for drafter in drafters)
        self.reads_logits = any(drafter.reads_logits for drafter in drafters)
        self.watches = any(drafter.watches for drafter in drafters)

    @property
    def remembered_by(self):
        keys = tuple(drafter.remembered_by for drafter in self.drafters)
        return _kind(keys) if all(isinstance(key, (type, _Kind)) for key in keys) else self

    @property
    def max_tokens(self) -> int:
        """The largest of all drafters; that of `SelfSpeculation` is known after `check`."""
        return max(drafter.max_tokens for drafter in self.drafters)

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """Those of all drafters, each once; those of published heads are known after `check`."""
        return tuple(dict.fromkeys(layer for drafter in self.drafters for layer in drafter.reads_layers))

    def _part(self, drafter: Drafter, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """What `drafter` reads of the hidden states of all, [..., hidden size * (1 + layers)]."""
        if not drafter.reads_hidden:
            return None
        if drafter.reads_layers == self.reads_layers:
            return hidden
        last, *inner = hidden.chunk(1 + len(self.reads_layers), -1)
        return torch.cat([last, *(inner[self.reads_layers.index(layer)] for layer in drafter.reads_layers)], -1)

    def check(self, model) -> None:
        for drafter in self.drafters:
            drafter.check(model)
            drafter.check_max_tokens()

    def begin(self, sequences: Sequences, hidden: torch.Tensor | None = None) -> None:
        self.device = sequences.device
        self._trust = [[_Trust() for _ in self.drafters] for _ in sequences.live]
        self._trees = [None] * len(self.drafters)
        for drafter in self.drafters:
            drafter.begin(sequences, self._part(drafter, hidden))

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        proposals = []
        for number, drafter in enumerate(self.drafters):
            self._trees[number] = None
            proposal = drafter.propose([min(limit, drafter.max_tokens) for limit in limits], nodes)
            if proposal is not None:
                if proposal.confidence is None:
                    raise ValueError(
                        f"{type(drafter).__name__} does not say how sure it is: BestOf cannot rank its tokens"
                    )
                trees = self._trees[number] = trees_of(proposal)
                proposals.append([row[number].scaled(tree) for row, tree in zip(self._trust, trees)])
        if len(proposals) < 2:
            return proposal_of(proposals[0], self.device) if proposals else None
        return proposal_of([_merge(trees, nodes) for trees in zip(*proposals)], self.device)

    def stirs(self) -> int:
        return max([drafter.stirs() for drafter in self.drafters])

    def observe(self, tokens: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor) -> None:
        for drafter in self.drafters:
            if drafter.reads_logits:
                drafter.observe(tokens, counts, logits)

    def accept(self, tokens: list[list[int]], hidden: torch.Tensor | None = None) -> None:
        for number, drafter in enumerate(self.drafters):
            for row, (tree, text) in enumerate(zip(self._trees[number] or (), tokens)):
                self._trust[row][number].learn(tree, text)
            self._trees[number] = None
            drafter.accept(tokens, self._part(drafter, hidden))

    def select(self, rows: list[int]) -> None:
        self._trust = [self._trust[row] for row in rows]
        for drafter in self.drafters:
            drafter.select(rows)


class _Kind:
    """What all `BestOf` of the same drafters without a model are remembered by."""


@functools.cache
def _kind(keys: tuple) -> _Kind:
    return _Kind()


class _Trust:
    """How far to believe a drafter in one sequence: tokens that it proposed rightly by those that it promised."""

    def __init__(self):
        self.right = self.promised = _PRIOR_TOKENS

    def learn(self, tree: RowTree, text: list[int]) -> None:
        """text: the tokens that followed. Looks at the children of each node on its path, verified or not."""
        self.right, self.promised = _DECAY * self.right, _DECAY * self.promised
        at, chance = -1, 1.0
        for token in text:
            children = {tree.tokens[node]: node for node, parent in enumerate(tree.parents) if parent == at}
            if not children:
                break
            self.promised += min(1.0, sum(tree.confidence[node] for node in children.values()) / max(chance, 1e-6))
            if token not in children:
                break
            self.right += 1
            at = children[token]
            chance = tree.confidence[at]

    def scaled(self, tree: RowTree) -> RowTree:
        """`tree` with probabilities as this sequence has shown them to be."""
        factor = (self.right + _PRIOR_TOKENS) / (self.promised + _PRIOR_TOKENS)
        depths = []
        for parent in tree.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        scaled: list[float] = []  # no node is more probable than its parent
        for chance, depth, parent in zip(tree.confidence, depths, tree.parents):
            scaled.append(min(1.0 if parent < 0 else scaled[parent], chance * factor**depth))
        return tree._replace(confidence=scaled)


def _merge(trees: tuple[RowTree, ...], nodes: int) -> RowTree:
    """The `nodes` most probable nodes of all trees."""
    found: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    total: dict[int, float] = {}  # node -> the sum of its children's probabilities
    tokens, parents, chances = [], [], []  # chances: probability, given that the parent is accepted
    for tree in trees:
        merged, before = {-1: -1}, dict(total)  # merged: node of this tree -> node of the merged tree
        for node, (token, parent, confidence) in enumerate(zip(*tree)):
            if confidence < _MIN_CONFIDENCE:  # and so are its children
                continue
            above = merged[parent]
            chance = confidence if parent < 0 else min(confidence / tree.confidence[parent], 1.0)
            chance *= max(0.0, 1 - before.get(above, 0.0))  # trust may scale siblings to more than 1 in all
            index = merged[node] = found.setdefault((above, token), len(tokens))
            if index == len(tokens):
                tokens.append(token)
                parents.append(above)
                chances.append(0.0)
            chances[index] += chance
            total[above] = total.get(above, 0.0) + chance
    for index, above in enumerate(parents):
        if above >= 0:
            chances[index] = min(chances[index], 1.0) * chances[above]
    order = sorted(range(len(tokens)), key=chances.__getitem__, reverse=True)[:nodes]
    new = {-1: -1} | {old: node for node, old in enumerate(order)}
    return RowTree([tokens[i] for i in order], [new[parents[i]] for i in order], [chances[i] for i in order])
