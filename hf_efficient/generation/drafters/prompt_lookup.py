"""Drafts copied from the sequence itself: what followed where its last tokens occurred before."""

from heapq import heappop, heappush

from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.drafters.suffix_automaton import RepeatWatch, SuffixAutomaton, Walk
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.token_tree import RowTree, proposal_of


# Share of the continuations that were right, by the length of the match (`_bucket`): SmolLM2-135M on summaries,
# rewriting, code and open chat. `PromptLookup` starts from these and learns its own.
_ACCURACIES = (0.33, 0.59, 0.66, 0.71, 0.79, 0.85, 0.85, 0.93, 0.96, 0.98, 0.99)
_PRIOR_TOKENS = 8.0  # tokens of the user's own that they weigh as much as
_MAX_COUNT = 256.0  # matches of a bucket after which its counts are halved
_LATEST_SHARE = 0.3  # of the probability, for the latest continuation; the rest is shared by frequency
_MIN_CONFIDENCE = 0.01  # less probable guesses are not made
# One sequence in so many has to repeat itself before drafts are tried again: the others would wait for its
# verification, and the longest one decides when a batch ends.
STIRRING_SHARE = 4
MOST_SHARED = 4  # other sequences with the same prompt that one looks into


class PromptLookup(Drafter):
    """Finds the longest suffix of a sequence that occurred in it before, in prompt or output, and proposes what
    followed there (Saxena 2023, "Prompt Lookup Decoding"; Hu et al. 2024, "SAM Decoding"). Needs no model.

    If several continuations have occurred, the proposal is a tree of them, grown from the most probable node: recent
    and frequent continuations are more probable. A copy may continue into its own output, so a phrase that repeats
    itself is drafted to full length. Of an encoder-decoder, the encoder's text is searched too. Sequences with the same
    prompt are also searched in each other, for longer matches. How often matches of each length are right is learned
    from every sequence, and kept for later calls. Costs O(nodes) per step and sequence and O(1) amortised per token, on
    the host.

    `generate(prompt_lookup_num_tokens=n)` is `PromptLookup(n)`, with `max_matching_ngram_size` for `max_ngram`.

    Args:
        num_tokens: the most tokens that it proposes for a sequence, in one continuation or in a tree, >= 1.
        max_ngram: length of the longest suffix looked up, >= 1; None: any length.
    """

    computes = False
    watches = True

    def __init__(self, num_tokens: int = 20, max_ngram: int | None = None):
        for name, spelled, value in (
            ("num_tokens", "prompt_lookup_num_tokens", num_tokens),
            ("max_ngram", "max_matching_ngram_size", 1 if max_ngram is None else max_ngram),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{spelled}={value!r} ({name} of PromptLookup): expected an integer of at least 1")
        self.max_tokens, self.max_ngram = num_tokens, max_ngram
        self.right = [rate * _PRIOR_TOKENS for rate in _ACCURACIES]
        self.matches = [_PRIOR_TOKENS] * len(_ACCURACIES)
        self.rows, self.walks = [], []
        self._texts, self._new = None, []  # prompts and later tokens that the rows do not hold yet
        self._watches: list[RepeatWatch] = []

    @property
    def remembered_by(self):
        return PromptLookup  # `generate(prompt_lookup_num_tokens=n)` makes one for each call

    def begin(self, sequences: Sequences, hidden=None) -> None:
        if self._texts is None:  # a call without a proposal teaches nothing
            self._read()
        self.device = sequences.device
        self.rows = [SuffixAutomaton() for _ in sequences.live]
        prompts = [*map(tuple, sequences.tokens[sequences.live, : sequences.prompt_length].tolist())]
        self.walks, self._new = self._walks(prompts), []
        source = None if sequences.source is None else sequences.source.rows(sequences.live).token_lists()
        texts = sequences.token_lists()
        self._texts = [[*part, *text] for part, text in zip(source, texts)] if source else texts
        seen = {prompt: set() for prompt in prompts}  # sequences with the same one look into each other
        self._watches = [RepeatWatch(text, seen[prompt]) for text, prompt in zip(self._texts, prompts)]

    def stirs(self) -> int:
        if not any([watch.has_repeated() for watch in self._watches]):
            return 0
        repeated = sorted([watch.repeated for watch in self._watches])
        return repeated[-max(1, len(repeated) // STIRRING_SHARE)]

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        self._read()
        self.stirs()  # what came so far is known
        nodes = min(nodes, self.max_tokens)
        rows = zip(self.rows, limits, self.walks)
        return proposal_of([self.guess(row, limit, nodes, walks) for row, limit, walks in rows], self.device)

    def _walks(self, prompts: list[tuple[int, ...]]) -> list[list[Walk]]:
        """For each sequence, a walk in the text of each other one that shares its prompt."""
        if self.max_ngram is not None:  # walks match as far as they can
            return [[] for _ in self.rows]
        shared = {}
        for row, prompt in zip(self.rows, prompts):
            shared.setdefault(prompt, []).append(row)
        same = [(own, shared[prompt][: MOST_SHARED + 1]) for own, prompt in zip(self.rows, prompts)]
        return [[Walk(row) for row in rows if row is not own][:MOST_SHARED] for own, rows in same]

    def guess(self, row: SuffixAutomaton, depth: int, nodes: int, walks: tuple | list[Walk] = ()) -> RowTree:
        """At most `nodes` guesses of what follows a sequence, the most probable first."""
        state = row.match(self.max_ngram)
        matched = row.length[state]
        best = None
        for walk in walks:
            walk.settle()
            # where the other text ends there is nothing to copy yet
            if walk.matched > matched and walk.text.following[walk.state]:
                best, matched = walk, walk.matched
        if best is not None:
            return self._grown(best.text, best.state, matched, depth, nodes)
        return self._grown(row, state, row.length[row.whole], depth, nodes)

    def _grown(self, row: SuffixAutomaton, state: int, matched: int, depth: int, nodes: int) -> RowTree:
        """From a state of `row`, which `matched` tokens lead to."""
        following, link, length, count, latest = row.following, row.link, row.length, row.count, row.latest
        tokens, parents, confidence, heap, pushed = [], [], [], [], 0
        chance, level = 1.0, 0
        while True:
            while not following[state]:  # at the end of the sequence the copy continues where it began
                state = link[state]
            if state and level < depth:
                matched = min(matched, length[state], self.max_ngram or matched)
                bucket = _bucket(matched)
                chance *= self.right[bucket] / self.matches[bucket]
                choices = following[state].items()
                seen = sum([count[reached] for _, reached in choices])
                newest = max([latest[reached] for _, reached in choices])
                for token, reached in choices:
                    share = (1 - _LATEST_SHARE) * count[reached] / seen + _LATEST_SHARE * (latest[reached] == newest)
                    if chance * share > _MIN_CONFIDENCE:
                        pushed += 1
                        after = (token, reached, matched + 1, level + 1, len(tokens) - 1)
                        heappush(heap, (-chance * share, pushed, *after))
            if not heap or len(tokens) == nodes:
                return RowTree(tokens, parents, confidence)
            chance, _, token, state, matched, level, parent = heappop(heap)
            chance = -chance
            tokens.append(token)
            parents.append(parent)
            confidence.append(chance)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        self._new.append(tokens)
        for watch, new in zip(self._watches, tokens):
            for token in new:
                watch.read(token)

    def _read(self) -> None:
        for row, text in zip(self.rows, self._texts or ()):
            for token in text:
                row.append(token)
        self._texts = None
        for tokens in self._new:
            for row, new in zip(self.rows, tokens):
                for token in new:
                    self.read(row, token)
            for walks, new in zip(self.walks, tokens):
                for walk in walks:
                    walk.settle()
                    for token in new:
                        walk.advance(token)
        self._new = []

    def read(self, row: SuffixAutomaton, token: int) -> None:
        """Appends a token that a sequence continued with, and learns whether its match was right."""
        state = row.match(self.max_ngram)
        if state:
            matched = row.length[state]
            self._learn(min(matched, self.max_ngram or matched), token in row.following[state])
        row.append(token)

    def _learn(self, matched: int, right: bool) -> None:
        bucket = _bucket(matched)
        self.right[bucket] += right
        self.matches[bucket] += 1
        if self.matches[bucket] > _MAX_COUNT:
            self.right[bucket] /= 2
            self.matches[bucket] /= 2

    def select(self, rows: list[int]) -> None:
        if self._texts is None:
            self._read()
        else:
            self._texts = [self._texts[row] for row in rows]
            self._new = [[tokens[row] for row in rows] for tokens in self._new]
        kept = ([each[row] for row in rows] for each in (self.rows, self.walks, self._watches))
        self.rows, self.walks, self._watches = kept


def _bucket(matched: int) -> int:
    """Index into `_ACCURACIES` of a match of `matched` tokens: 1 to 7, then 8 to 15, 16 to 31, 32 to 63, longer."""
    return matched - 1 if matched < 8 else min(matched.bit_length() + 3, len(_ACCURACIES) - 1)
