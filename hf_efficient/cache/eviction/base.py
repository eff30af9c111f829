"""What an eviction method is: a `Scorer` says which tokens matter, one paper a file, and an `EvictionPolicy` how many
stay and when the others go."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


class View(NamedTuple):
    """What a scorer reads of one layer. n: tokens of the longest head of a sequence. W: queries.

    keys, values: [B, Hk, n, D], [B, Hk, n, Dv], as stored (after the rotary embedding, in the model's dtype), in the
        order of the text. Heads may hold different tokens.
    key_positions: int64 [B, Hk, n], positions of the keys in their sequence, from 0.
    present: bool [B, Hk, n], False for padding after the last token of a head.
    queries: [B, Hq, W, D], the last ones, after the rotary embedding.
    query_positions: int64 [B, W], -1 for padding.
    softmax_scale, softcap: of the attention; softcap 0 means none.
    budgets: tokens per head that each sequence is to keep, -1 for all.
    accumulated: float32 [B, Hk, n], the sums of what `Scorer.accumulate` returned; None for scorers that accumulate
        nothing.
    rotate: (x [..., n, D], positions int64 that expand to [..., n]) -> x rotated forward by these positions; None for
        scorers that do not need the rotary embedding.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_positions: torch.Tensor
    present: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    softmax_scale: float
    softcap: float
    budgets: list[int]
    accumulated: torch.Tensor | None
    rotate: Callable | None

    def attention(self, columns: slice = slice(None)) -> torch.Tensor:
        """Causal attention probabilities of the queries `columns`, float32 [B, Hk, G, W, n]; zeros for padding.

        Query head h * G + g belongs to key head h.
        """
        queries, positions = self.queries[:, :, columns], self.query_positions[:, columns]
        scores = self.logits(queries).float()
        seen = self.present[:, :, None] & (self.key_positions[:, :, None] <= positions[:, None, :, None])
        scores = scores.masked_fill(~seen[:, :, None], torch.finfo(torch.float32).min)
        return scores.softmax(-1).mul_((positions >= 0)[:, None, None, :, None])

    def logits(self, queries: torch.Tensor) -> torch.Tensor:
        """Scaled (and soft-capped) products float32 [B, Hk, G, W, n] of queries [B, Hq, W, D] with all keys."""
        grouped = queries.float().unflatten(1, (self.keys.shape[1], -1))
        scores = grouped.flatten(2, 3).mul(self.softmax_scale).matmul(self.keys.float().transpose(2, 3))
        scores = scores.unflatten(2, grouped.shape[2:4])
        return torch.tanh(scores / self.softcap) * self.softcap if self.softcap else scores


def check_positive(**arguments) -> None:
    """Raises ValueError for arguments that are not positive integers."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive integer")


class Scorer:
    """Scores the tokens of a layer. A subclass defines `score`. It holds no state, because all layers share it.

    Args:
        recent: last tokens that always stay. Of tokens drafted together with the prompt, speculation can take back at
            most this many.

    Attributes:
        sinks: first tokens that always stay.
        window: the number of last queries that `score` reads; fewer if there are fewer since the cache was empty.
        accumulates: `accumulate` is called with every query once.
        needs_rotary: `score` uses `View.rotate`.
        reindexes: every eviction moves the keys of the sinks, so that the kept tokens are consecutive for the model.
            Only valid if the kept tokens are the sinks and the last ones.
    """

    sinks = 0
    window = 0
    accumulates = False
    needs_rotary = False
    reindexes = False

    def __init__(self, recent: int = 32):
        check_positive(recent=recent)
        self.recent = recent

    def score(self, view: View) -> torch.Tensor:
        """Scores [B, Hk, n]: the tokens with the highest ones stay. Those of sinks, recent tokens and padding are not
        read."""
        raise NotImplementedError

    def accumulate(self, view: View) -> torch.Tensor:
        """float32 [B, Hk, n] to add to `View.accumulated`. `view.queries` are the queries since the last call."""
        raise NotImplementedError

    def recent_tokens(self, budget: int) -> int:
        """The number of last tokens that always stay if a head keeps `budget` tokens on average."""
        return self.recent

    def counts(self, scores: torch.Tensor, budgets: list[int]) -> list[list[int]]:
        """The number of tokens that each head of each sequence keeps: `budgets[b]` on average, at most what it has.

        scores: [B, Hk, n], inf for tokens that must stay, -inf for absent ones.
        """
        return [[budget] * scores.shape[1] for budget in budgets]


class EvictionPolicy:
    """Bounds the tokens of each layer: `PagedCache(model.config, eviction=EvictionPolicy(SnapKV(), budget=0.5))`.

    Args:
        scorer: chooses the tokens that stay: `SinkWindow`, `HeavyHitter`, `TOVA`, `SnapKV`, `ExpectedAttention`,
            `KeyNorm`, `Distinctive` or `AdaKV`, or a `Scorer` of your own.
        budget: tokens that a key head keeps on average. An int, or a float between 0 and 1 for a share of the tokens
            read so far, at least the scorer's sinks and recent tokens.
        when: "prefill" evicts after a prompt: the first forward, and each later one of more than 64 new tokens per
            sequence (a further chunk, or the next turn of a chat). "always" evicts whenever a forward leaves more than
            the budget. An eviction takes as long as tens of new tokens. So it then goes below the budget, by a block
            less one token, or by an eighth of the budget if that is more and the forward was no prompt. The budget
            should be many blocks. The tokens of a forward of up to 64 stay if the budget has room for them, so that
            speculation can take them back.

    Raises ValueError for other arguments.
    """

    def __init__(self, scorer: Scorer, budget: int | float, when: str = "prefill"):
        if not isinstance(scorer, Scorer):
            raise ValueError(f"scorer={scorer!r}: must be a Scorer of hf_efficient, such as SnapKV()")
        if when not in ("prefill", "always"):
            raise ValueError(f'when={when!r}: must be "prefill" or "always"')
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise ValueError(f"budget={budget!r}: must be a number of tokens, or a share between 0 and 1")
        self.scorer, self.budget, self.when = scorer, budget, when
        self.least = scorer.sinks + scorer.recent
        if isinstance(budget, float) and not 0 < budget < 1:
            raise ValueError(f"budget={budget}: a share must lie between 0 and 1; give an int for a number of tokens")
        if isinstance(budget, int) and budget < self.least:
            raise ValueError(
                f"budget={budget}: {type(scorer).__name__} always keeps {scorer.sinks} sinks and "
                f"{scorer.recent} recent tokens, so {self.least} or more are needed"
            )

    def target(self, seen: int) -> int:
        """Tokens per head that a sequence may hold after it has read `seen` tokens."""
        return self.budget if isinstance(self.budget, int) else max(math.ceil(self.budget * seen), self.least)

    def left(self, target: int, block_size: int, is_prompt: bool) -> int:
        """Tokens per head that remain after an eviction in a sequence that may hold `target`."""
        slack = 0 if self.when == "prefill" else block_size - 1
        return max(target - (slack if is_prompt else max(slack, target // 8)), self.least)
