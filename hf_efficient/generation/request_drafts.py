"""Drafts for the requests of continuous batching, each of which grows and ends independently.

The engine verifies drafts in the forward that computes each request's next token, so they can only cost time.
"""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from hf_efficient.generation.drafters.prompt_lookup import PromptLookup
from hf_efficient.generation.drafters.suffix_automaton import SuffixAutomaton
from hf_efficient.generation.speculation.proposal import MAX_NODES
from hf_efficient.generation.speculation.request_policy import RequestDraftPolicy
from hf_efficient.generation.speculation.token_tree import RowTree


class Growing(NamedTuple):
    """A request that gets its next token in this step.

    id: its name, for as long as it grows.
    tokens: its prompt and what it generated.
    prompt: how many of them are the prompt's.
    limit: drafts that it can use: one less than it may still grow.
    blocks: returns those of its pages, once there is room for its drafts.
    """

    id: str
    tokens: list[int]
    prompt: int
    limit: int
    blocks: Callable[[], list[int]]


class RequestDrafts:
    """What proposes the drafts of a step. A subclass implements `_propose`.

    Args:
        policy: which of them are verified.
        max_tokens: drafts of a request at most.
    """

    def __init__(self, policy: RequestDraftPolicy, max_tokens: int):
        self.policy, self.max_tokens = policy, max_tokens
        self._spent = 0.0  # seconds of the last proposal

    def propose(
        self, requests: list[Growing], growing: int, tokens: int, room: Callable[[int, int], int]
    ) -> list[list[int]]:
        """The drafts of each request in a step in which the policy does not rest, often none.

        Args:
            growing: requests that get a token in this step, those that may not draft included.
            tokens: of the step's forward without drafts.
            room: room(request, count) -> for how many drafts there is room in the pages, at most `count`.
        """
        limits = [min(request.limit, self.max_tokens) for request in requests]
        if not requests or max(limits) <= 0:
            return [[]] * len(requests)
        self._read(requests)
        start = perf_counter()
        found = self._propose(requests, limits, growing, tokens, room)
        self._spent = perf_counter() - start
        return found

    def _read(self, requests: list[Growing]) -> None:
        """Reads what is new of the requests. Once for each of their tokens, it does not count as what drafts cost."""

    def _propose(self, requests, limits, growing, tokens, room) -> list[list[int]]:
        raise NotImplementedError

    def learn(self, requests: list[Growing], proposed: list[int], accepted: list[int], tokens: int) -> None:
        """What came of the drafts of a step, whose forward had `tokens` tokens with them: counts for each request."""
        policy = self.policy
        if not self._spent:
            return
        plain = policy.seconds(tokens - sum(proposed))
        more = policy.seconds(tokens) - plain
        won = sum(accepted) * plain / max(1, len(requests))
        policy.count(won, self._spent + more, sum(proposed))
        self._spent = 0.0


class LookupDrafts(RequestDrafts):
    """`PromptLookup` for each request. How often matches were right is learned from all of them together."""

    def __init__(self, policy: RequestDraftPolicy, num_tokens: int):
        super().__init__(policy, num_tokens)
        self.lookup = PromptLookup(num_tokens)
        self._rows: dict[str, tuple[SuffixAutomaton, list[int]]] = {}  # by request, with the tokens it has read

    def _read(self, requests):
        self._rows = {request.id: self._row(request) for request in requests}

    def _propose(self, requests, limits, growing, tokens, room):
        trees = [
            self.lookup.guess(self._rows[request.id][0], limit, min(limit, MAX_NODES)) if limit > 0 else None
            for request, limit in zip(requests, limits)
        ]
        chains = [_likeliest(tree) if tree else ([], []) for tree in trees]
        counts = self.policy.share([chances for _, chances in chains], growing, tokens)
        return [
            chain[: room(index, count) if count else 0] for index, ((chain, _), count) in enumerate(zip(chains, counts))
        ]

    def _row(self, request: Growing) -> tuple[SuffixAutomaton, list[int]]:
        row, read = self._rows.get(request.id, (None, None))
        if row is None or request.tokens[: len(read)] != read:
            row, read = SuffixAutomaton(), []
        for position in range(len(read), len(request.tokens)):
            token = request.tokens[position]
            row.append(token) if position < request.prompt else self.lookup.read(row, token)
        return row, request.tokens


def _likeliest(tree: RowTree) -> tuple[list[int], list[float]]:
    """The path of a tree that takes the most probable child each time: its tokens and their probabilities."""
    tokens, chances, last = [], [], -1
    for node, parent in enumerate(tree.parents):  # siblings: the most probable first
        if parent == last:
            tokens.append(tree.tokens[node])
            chances.append(tree.confidence[node])
            last = node
    return tokens, chances
