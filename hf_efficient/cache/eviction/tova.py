"""TOVA: the attention that the last query pays."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View


class TOVA(Scorer):
    """Scores a token by the attention of the last query, averaged over all heads, so that all keep the same tokens.

    Paper: Oren et al., Transformers are Multi-State RNNs (https://arxiv.org/abs/2401.06104).

    Args:
        recent: last tokens that always stay.
    """

    window = 1

    def score(self, view: View) -> torch.Tensor:
        return view.attention()[..., -1, :].mean((1, 2))[:, None].expand(view.present.shape)
