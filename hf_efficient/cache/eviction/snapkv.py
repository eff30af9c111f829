"""SnapKV: the attention that the last queries of the prompt pay, averaged over neighbours."""

import torch
import torch.nn.functional as F

from hf_efficient.cache.eviction.base import Scorer, View, check_positive


class SnapKV(Scorer):
    """Scores a token by the attention of the last queries, averaged over neighbouring tokens and the heads of a group.

    The last tokens before the window also have neighbours in the window, which the paper leaves out.

    Paper: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation (https://arxiv.org/abs/2404.14469).

    Args:
        window: last queries, whose tokens always stay.
        kernel_size: neighbouring tokens over which the scores are averaged, an odd number.
    """

    def __init__(self, window: int = 64, kernel_size: int = 5):
        check_positive(window=window, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size}: must be odd")
        super().__init__(recent=window)
        self.window = window
        self.kernel_size = kernel_size

    def score(self, view: View) -> torch.Tensor:
        scores = view.attention().mean(3)  # [B, Hk, G, n]
        shape = scores.shape
        pooled = F.avg_pool1d(scores.flatten(0, 2)[:, None], self.kernel_size, 1, self.kernel_size // 2)
        return pooled.view(shape).mean(2)
