"""Expected Attention: the attention that later queries pay if they are distributed like the last ones."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View, check_positive


class ExpectedAttention(Scorer):
    """Scores a token by its value's norm times the mean attention of future queries, which are assumed to be normal.

    Mean and covariance of the queries are taken before the rotary embedding, which is averaged over future positions.

    Paper: Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution (https://arxiv.org/abs/2510.00636).

    Args:
        window: last queries from which the distribution is estimated.
        future: positions ahead over which the rotary embedding is averaged.
        recent: last tokens that always stay.
    """

    sinks = 4
    needs_rotary = True

    def __init__(self, window: int = 512, future: int = 512, recent: int = 32):
        super().__init__(recent)
        check_positive(window=window, future=future)
        self.window, self.future = window, future

    def score(self, view: View) -> torch.Tensor:
        positions, heads = view.query_positions, view.keys.shape[1]
        weights = (positions >= self.sinks).float()
        weights = (weights / weights.sum(1, keepdim=True).clamp_min(1))[:, None, :, None]
        queries = view.rotate(view.queries, -positions[:, None].expand(view.queries.shape[:3]))
        mean = (queries * weights).sum(2, keepdim=True)  # [B, Hq, 1, D]
        spread = (queries - mean) * weights.sqrt()
        covariance = spread.transpose(2, 3) @ spread
        rotation = self._mean_rotation(view, positions.amax(1))  # [B, 1, D, D]: x @ rotation is x moved on
        mean = mean @ rotation
        covariance = rotation.transpose(2, 3) @ covariance @ rotation
        keys = view.keys.float().repeat_interleave(queries.shape[1] // heads, 1) * view.softmax_scale
        logits = (keys @ mean.transpose(2, 3)).squeeze(3) + ((keys @ covariance) * keys).sum(3) / 2
        logits = logits.unflatten(1, (heads, -1)).masked_fill(~view.present[:, :, None], float("-inf"))
        logits[..., : self.sinks] = float("-inf")  # they stay anyway, and would take most of the attention
        return logits.softmax(-1).mean(2) * view.values.float().norm(dim=-1)

    def _mean_rotation(self, view: View, last: torch.Tensor) -> torch.Tensor:
        """[B, 1, D, D]: the mean over the next positions of the matrix that the rotary embedding multiplies with."""
        mean = view.rotate.mean_ahead(self.future, view.keys.shape[3], last.device)
        return view.rotate(mean.expand(len(last), -1, -1), last[:, None])[:, None]
