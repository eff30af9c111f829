"""A smaller model that drafts for the requests of continuous batching."""

from collections.abc import Callable, Sequence
from time import perf_counter

from hf_efficient.cache.request_pages import NewTokens
from hf_efficient.generation.drafters.draft_model import check_draft, draft_settings
from hf_efficient.generation.replay.captured_step import CapturedStep
from hf_efficient.generation.request_drafts import Growing, RequestDrafts
from hf_efficient.generation.speculation.draft_length import DRAFT_DECAY, PRIOR_TOKENS
from hf_efficient.generation.speculation.latency_model import PRIOR_ACCEPTANCE, LatencyCurve
from hf_efficient.generation.speculation.request_policy import RequestDraftPolicy


class _Read:
    """What a draft model has read of a request.

    tokens: those in its pages. blocks: where they lie. accepted, proposed: decayed counts of its drafts.
    """

    def __init__(self):
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self.accepted = self.proposed = 0.0


class ModelDrafts(RequestDrafts):
    """Greedy drafts of a smaller model. Its pages are numbered as the target's: a request has the same block table in
    both, so that nothing is allocated for it.

    Args:
        model: the smaller model, whose `generation_config` limits the drafts.
        step: returns its captured forwards, over pages of as many blocks as the target's.
        page_size: tokens of a page.
    """

    def __init__(self, policy: RequestDraftPolicy, model, step: Callable[[], CapturedStep], page_size: int):
        super().__init__(policy, draft_settings(model)[0])
        self.step, self.page_size = step, page_size
        self.step_seconds = LatencyCurve()  # of the draft model's forwards, by their tokens
        self._reads: dict[str, _Read] = {}

    @staticmethod
    def check(model) -> None:
        """Raises ValueError where `model` cannot draft."""
        check_draft(model)

    def _propose(self, requests, limits, growing, tokens, room):
        self._reads = {request.id: self._reads.get(request.id) or _Read() for request in requests}
        acceptance = [self._acceptance(self._reads[request.id]) for request in requests]
        # where no depth pays, whether it does now shows in a trial
        depth = max(1, self.policy.depth(acceptance, limits, growing, tokens, self.step_seconds.at))
        limits = [room(index, min(limit, depth)) if limit > 0 else 0 for index, limit in enumerate(limits)]
        return self._draft(requests, limits, tokens)

    def _draft(self, requests: list[Growing], limits: list[int], tokens: int) -> list[list[int]]:
        """Up to limits[i] tokens for each request, one a forward of the draft model. The last requests get none where
        `tokens` and all drafts would exceed `policy.most`."""
        drafts: list[list[int]] = [[] for _ in requests]
        rows = [row for row, limit in enumerate(limits) if limit > 0]
        excess = tokens + sum(limits) - self.policy.most
        while rows and excess > 0:
            excess -= limits[rows.pop()]
        step, fed = self.step(), {row: self._unread(requests[row]) for row in rows}
        while rows:
            names = [requests[row].id for row in rows]
            reads = [self._reads[name] for name in names]
            pasts = [len(read.tokens) for read in reads]
            new = NewTokens([fed[row] for row in rows], pasts, pasts, [[read.blocks for read in reads]], names)
            for read, some in zip(reads, new.tokens):
                read.tokens = read.tokens + list(some)
            start = perf_counter()
            best = step(new, [1] * len(rows))[1].tolist()
            if step.is_steady:
                self.step_seconds.add(new.total, perf_counter() - start)
            for row, token in zip(rows, best):
                drafts[row].append(token)
            rows = [row for row in rows if len(drafts[row]) < limits[row]]
            fed = {row: drafts[row][-1:] for row in rows}
        return drafts

    def _unread(self, request: Growing) -> Sequence[int]:
        """Takes off what the model has read in vain, and returns what it has yet to read: at least the last token."""
        read, blocks = self._reads[request.id], request.blocks()
        same = _common(read.blocks, blocks)
        count = min(_common(read.tokens, request.tokens), same * self.page_size, len(request.tokens) - 1)
        read.tokens, read.blocks = read.tokens[:count], list(blocks)
        return request.tokens[count:]

    def _acceptance(self, read: _Read) -> float:
        return (read.accepted + PRIOR_ACCEPTANCE * PRIOR_TOKENS) / (read.proposed + PRIOR_TOKENS)

    def learn(self, requests, proposed, accepted, tokens):
        for request, count, hits in zip(requests, proposed, accepted):
            if count and request.id in self._reads:
                read = self._reads[request.id]
                read.accepted = DRAFT_DECAY * read.accepted + hits
                # those after a rejected one: unknown
                read.proposed = DRAFT_DECAY * read.proposed + min(hits + 1, count)
        super().learn(requests, proposed, accepted, tokens)


def _common(a: list[int], b: list[int]) -> int:
    """How many first elements of two lists are the same."""
    count = min(len(a), len(b))
    if a[:count] == b[:count]:
        return count
    return next(index for index in range(count) if a[index] != b[index])
